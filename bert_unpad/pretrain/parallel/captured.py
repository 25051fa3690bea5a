"""CUDA graphs of the passes of a rank alone, or of ranks that average gradients.

No graph has DDP in it: it writes gradients into buckets, which are averaged beside its rest.
"""

from collections.abc import Callable

from torch import Tensor, nn

from bert_unpad.batch import PackedInputs
from bert_unpad.nn import PreTrainingOutput
from bert_unpad.pretrain.gradients.clipping import GradientReport
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner
from bert_unpad.pretrain.gradients.graph_buckets import GraphBuckets
from bert_unpad.pretrain.parallel.ddp import Ddp
from bert_unpad.pretrain.parallel.way import Way


def with_graphs(kind: type[Way]) -> type[Way]:
    """A way of sharing an update whose passes are CUDA graphs."""
    kinds = (_CapturedDdp if issubclass(kind, Ddp) else _Captured, kind)
    return type(f"Captured{kind.__name__}", kinds, {})


class _Captured(Way):
    captures = True

    def _wrap(self, leaves_out: bool) -> nn.Module:
        self._runner = GraphRunner(self.run.model, self.run.autocast)
        return self.run.model

    def _run_pass(
        self, inputs: PackedInputs, factors: Callable[[], Tensor], first: bool, last: bool
    ) -> PreTrainingOutput:
        return self._runner(inputs, factors(), first)


class _CapturedDdp(_Captured, Ddp):
    _buckets: GraphBuckets | None

    def _wrap(self, leaves_out: bool) -> nn.Module:
        self._make_clipping(True)
        self._buckets = None
        if self._bucket is not None:
            self._buckets = GraphBuckets(self.run.model, self.run.config.comm.bucket_mb)
            self._buckets.attach(self._bucket, self._hook.allreduce)
        return super()._wrap(leaves_out)

    def _send(self) -> None:
        if self._buckets is not None:
            self._buckets.send()

    def _clip(self) -> GradientReport:
        if self._buckets is not None:
            self._buckets.wait()
        return super()._clip()
