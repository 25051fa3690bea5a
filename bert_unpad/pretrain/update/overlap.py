"""Updates beside the forward pass that comes after them, on a stream of their own.

An update is bound by memory, a forward pass by matrix products, so a GPU can do both at once. The
parameters are updated chunk by chunk in the order in which a pass needs them: first all that are no
matrices of the encoder's layers, then the matrices of one layer after another. Hooks let a pass
wait for a chunk before what uses it, and at its end for the whole update. From there on gradients
may be set to zero and written, which the update reads. So it does not matter which layers a pass
leaves out, nor whether gradients stay in their memory.

It is not begun in the backward pass before: an update is left out where any gradient is not finite,
and that is known after the last one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bert_unpad.nn import Encoder, EncoderForPreTraining
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.update.optimizer import step_if


class SideStream:
    """A second stream of a GPU with numbered events, which CUDA graphs may wait for too.

    Args:
        device: the GPU.
        events: how many there are.
    """

    def __init__(self, device: torch.device, events: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # External: to wait for one while a graph is captured makes a node of the graph, and each
        # replay waits for what was recorded last before it was launched.
        self._events = [torch.cuda.Event(external=True) for _ in range(events)]
        for number in range(events):  # nothing waits for an event that was never recorded
            self.record(number)

    def run(self, work: Callable[[], None]) -> None:
        """Launches work that begins when the current stream has done what it was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def record(self, number: int) -> None:
        """Moves an event to the end of what was launched so far."""
        self._events[number].record(self._stream)

    def wait(self, number: int) -> None:
        """Lets the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(self._events[number])


class OverlappedUpdater:
    """Makes updates beside the next forward pass, which waits for a chunk before it uses it.

    Gradients that were let go stay in memory until that pass is over.

    Args:
        model: whose forward passes wait; on a GPU, not compiled.
        optimizer: of its parameters, one that takes chunks.
        stream: where updates run, with an event for each layer and two more; None makes one.
    """

    def __init__(
        self,
        model: EncoderForPreTraining,
        optimizer: FusedOptimizer,
        stream: SideStream | None = None,
    ) -> None:
        self._optimizer = optimizer
        layers = _layers(model)
        self._last = len(layers) + 1
        if stream is None:
            stream = SideStream(model.word_embeddings.device, self._last + 1)
        self._stream = stream
        self._read: list[Tensor] = []
        optimizer.update_in_chunks(update_order(model), stream.record)
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: stream.wait(0)),
            model.register_forward_hook(lambda *_: self.wait()),
        ]
        for number, layer in enumerate(layers, start=1):
            self._hooks.append(
                layer.register_forward_pre_hook(lambda *_, number=number: stream.wait(number))
            )

    def step(self, finite: Tensor) -> None:
        """Launches an update unless the gradient is not finite; gradients may then be let go.

        Args:
            finite: bool [], whether it is.
        """
        self.wait()
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        # The current stream would write to their memory again as soon as nobody had them.
        self._read = [finite, *(p.grad for p in parameters if p.grad is not None)]

        def update() -> None:
            step_if(self._optimizer, finite)
            self._stream.record(self._last)

        self._stream.run(update)

    def wait(self) -> None:
        """Lets the current stream wait for the update.

        Before anything but a pass reads or changes parameters, gradients or the optimizer's state.
        """
        self._stream.wait(self._last)
        self._read.clear()

    def end(self) -> None:
        """Waits for the update, and lets go of the model, which may change then."""
        self.wait()
        for hook in self._hooks:
            hook.remove()


def update_order(model: nn.Module) -> dict[Tensor, int]:
    """The chunks in which an update goes through the matrices of a model's encoder layers.

    Returns:
        For each of these matrices the number of its layer, from 1, in the order of a pass. All
        other parameters are chunk 0: a pass begins with the embeddings, which the decoder shares,
        and vectors would take one more launch in every chunk.
    """
    order: dict[Tensor, int] = {}
    for number, layer in enumerate(_layers(model), start=1):
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                order.setdefault(parameter, number)
    return order


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of all encoders, in the order of a pass: a generator comes before its model."""
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    return [layer for encoder in reversed(encoders) for layer in encoder.layer]
