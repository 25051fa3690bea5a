"""The training loop.

One step is: start adding up the counts of the global batch over the ranks, run forward and backward
passes on this rank's packed examples, clip and average the gradient, update. The host never waits
for a result of the step it is in. It looks at the sums of the step before, which also carry a
request to stop, so all ranks stop at the same step.
"""

import logging
import math
import time
from collections.abc import Iterator

from bert_unpad.pretrain.evaluate import Evaluator
from bert_unpad.pretrain.feed.steps import FeedState, Step
from bert_unpad.pretrain.growth.stage import staged_lr_factor
from bert_unpad.pretrain.interrupt import StopRequest
from bert_unpad.pretrain.losses import averages
from bert_unpad.pretrain.output.log import TrainingLog
from bert_unpad.pretrain.output.mlperf_log import MlperfLog
from bert_unpad.pretrain.parallel.way import seed_step
from bert_unpad.pretrain.ranks import HostSums
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.run_state import RunState
from bert_unpad.pretrain.stages import Stages
from bert_unpad.pretrain.update.optimizer import leaves_out_on_device
from bert_unpad.pretrain.update.schedule import warmup_updates
from bert_unpad.pretrain.update.state import check_state, state_bytes

logger = logging.getLogger(__name__)

# Updates in a row that may be left out because gradients are not finite, before the run ends.
_MAX_SKIPPED = 20


class Trainer:
    """Runs the steps of a run, and between them the log, evaluation and checkpoints.

    Args:
        run: its settings, processes, model and progress.
        stages: what trains, and how; ready for the next update.
        state: saves the run.
        evaluator: measures the model on held-out examples; None to do without.
        mlperf: notes blocks and evaluations, where the run has such a log.
        total_steps: updates of the whole run.
    """

    def __init__(
        self,
        run: Run,
        stages: Stages,
        state: RunState,
        evaluator: Evaluator | None,
        mlperf: MlperfLog,
        total_steps: int,
    ) -> None:
        self.config, self.ranks, self.model = run.config, run.ranks, run.model
        self.progress = run.progress
        self.stages = stages
        self.state = state
        self.evaluator = evaluator
        self.mlperf = mlperf
        self.total_steps = total_steps
        self.warmup_steps = warmup_updates(run.config.schedule, total_steps)
        self.log = TrainingLog(run, total_steps)
        batch = run.config.batching.per_rank(run.ranks.world_size) * run.ranks.world_size
        self._every = {
            "log": run.config.logging.every,
            "evaluation": run.config.evaluation.updates_between(batch),
            "checkpoint": run.config.checkpoint.every,
        }
        self._saved_step = run.progress.step
        self._rows: int | None = None
        self._skipped_in_row = 0
        self._reported_stage: int | None = None
        self._checked_state = False

    def train(self, stop: StopRequest) -> bool:
        """Trains until the last step, the target accuracy, or a request to stop.

        The state is on disk when this returns. Files of the log are closed however it ends.

        Returns:
            Whether training is finished; if not, a signal has stopped it.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        if self.evaluator is not None:
            self.mlperf.start_training(self.evaluator.examples)
        try:
            stopped = self._run_stages(stop)
            if self._saved_step != self.progress.step:
                self._save()
            self.state.wait()
            self.log.note_costs()
        finally:
            self.log.close()
        return not stopped

    def _run_stages(self, stop: StopRequest) -> bool:
        """Trains to the end of the run or the target; whether a signal has stopped it."""
        progress, stopped = self.progress, False
        try:
            while not (stopped or progress.target_reached):
                with self.stages.steps(self.total_steps) as steps:
                    stopped = self._run_stage(steps, stop)
                if progress.step == self.total_steps:
                    break
                if not (stopped or progress.target_reached):
                    self.stages.begin()
        except FloatingPointError:
            self._abort()
            raise
        if not stopped:  # by a signal: that is no result, so the log has no end
            self._abort()
        return stopped

    def _abort(self) -> None:
        if not self.progress.target_reached:
            self.mlperf.abort(self.progress.sequences)

    def _run_stage(self, steps: Iterator[tuple[Step, FeedState]], stop: StopRequest) -> bool:
        """Trains to the end of the stage, the run or the target; whether a signal has stopped it.

        No sum of a step is left open.
        """
        progress = self.progress
        pending: HostSums | None = None
        stopped = False
        end = min(self.stages.stage.end, self.total_steps)
        if self.stages.is_last:
            end = self.total_steps
        while progress.step < end and not progress.target_reached and not stopped:
            asked = time.perf_counter()
            step, feed = next(steps)
            self.ranks.at_step(progress.step + 1)
            self.stages.choose_layers()
            own = {
                "data_wait": time.perf_counter() - asked,
                "flops": self.model.num_flops(step.lengths, step.num_masked),
                "work": self.stages.work_of(step),
                "stop": stop.signal is not None,
            }
            counts = HostSums(self.ranks, step.counts | own)
            if pending is not None and self._book(pending):
                counts.on_host()  # every rank has joined in this sum, and drops it
                stopped = True
                break
            self._update(step, counts)
            self._advance(step, feed)
            spans = self.stages.way.clock.take()
            self.log.window.add_spans(spans)
            if self.stages.follow_speeds(step, spans):
                self.log.write("rank_speeds", {"speeds": self.progress.rank_speeds})
            if (chosen := self.stages.follow_links(spans)) is not None:
                self.log.write("comm", chosen)
            pending = counts
            last = progress.step == self.total_steps
            due = {name: last or _due(progress.step, every) for name, every in self._every.items()}
            if any(due.values()):
                stopped = self._book(pending)
                pending = None
            if due["log"]:
                self._log()
            if due["evaluation"]:
                self._evaluate()
                if progress.target_reached and not due["log"]:
                    self._log()
            if due["checkpoint"] and not last:
                self._save()
        if pending is not None and not stopped:
            stopped = self._book(pending)
        return stopped

    def _update(self, step: Step, counts: HostSums) -> None:
        """One update of the parameters."""
        way, done = self.stages.way, self.progress.step
        seed_step(self.config.seed, done, self.ranks.rank)
        self.log.window.add_losses(way.accumulate(step, counts))
        gradient = way.finish()
        self.stages.forget_left_out()
        self.log.add_gradient(gradient)
        way.step(gradient.finite, self._lr(done))
        if not self._checked_state:  # before hours of training that no checkpoint can hold
            self._checked_state = check_state(way.optimizer)

    def _lr(self, done: int) -> float:
        return self.config.optimizer.lr * staged_lr_factor(
            done, self.config.schedule, self.stages.growth, self.total_steps, self.warmup_steps
        )

    def _advance(self, step: Step, feed: FeedState) -> None:
        progress = self.progress
        progress.step += 1
        progress.epoch = step.epoch
        self.stages.position = feed.sampler
        self._rows = feed.rows
        self.log.add_step(step, feed.straggler_efficiency)

    def _book(self, counts: HostSums) -> bool:
        """Books the sums of a step; returns whether some rank has been asked to stop by then."""
        sums = counts.on_host()
        stop = sums.pop("stop") > 0
        longest = self.stages.stage.max_seq_length
        rows = sums["sequences"] if self._rows is None else self._rows
        more = {"slots": rows * longest, "squared_work": sums["work"] ** 2}
        self.log.window.add_counts(sums | more)
        sums["padded"] = sums["sequences"] * longest
        self.progress.add(sums)
        return stop

    def _log(self) -> None:
        sums, elapsed = self.log.close_interval()
        self._check_loss(sums)
        self._check_skipped(sums)
        self._report_state(updated=sums["skipped"] < sums["steps"])
        scale = self.stages.way.loss_scale
        state = {
            "layers": self.stages.stage.layers,
            "lr": self._lr(self.progress.step - 1),
            "loss_scale": None if scale is None else float(scale.value),
        }
        self.log.show_interval(sums, elapsed, state)

    def _report_state(self, updated: bool) -> None:
        """Says what the optimizer keeps on each rank, up to the first update of a stage."""
        if self._reported_stage == self.stages.index:
            return
        if updated:
            self._reported_stage = self.stages.index
        optimizer = self.stages.way.optimizer
        found = [int(size) for size in self.ranks.gather(state_bytes(optimizer))]
        on_device = leaves_out_on_device(optimizer)
        self.log.write("optimizer", {"state_bytes": found, "host_waits": not on_device})
        if updated and not on_device and self.ranks.is_first:
            logger.info(
                "optimizer.name %s does not read found_inf: before each update the host waits for "
                "the device to know whether the gradient is finite",
                self.config.optimizer.name,
            )

    def _check_loss(self, sums: dict[str, float]) -> None:
        """Ends a run that has diverged, before it saves a checkpoint of that."""
        loss = averages(sums, self.config.data.objective)["loss"]
        if loss is not None and not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} since the last line of the log, at step {self.progress.step}: "
                "lower optimizer.lr, lengthen the warm-up, or clip gradients"
            )

    def _check_skipped(self, sums: dict[str, float]) -> None:
        """Ends a run whose gradients have stopped being finite for good."""
        skips_all = sums["skipped"] == sums["steps"]
        self._skipped_in_row = self._skipped_in_row + int(sums["steps"]) if skips_all else 0
        if self._skipped_in_row >= _MAX_SKIPPED:
            raise FloatingPointError(
                f"the gradients of the last {self._skipped_in_row} steps were not finite, up to "
                f"step {self.progress.step}; no update was made"
            )

    def _evaluate(self) -> None:
        if self.evaluator is None:
            return
        progress = self.progress
        self.stages.way.synchronise()
        self.mlperf.start_evaluation(progress.sequences)
        with self.log.watch.paused():
            result = self.evaluator(self.model)
        target, accuracy = self.config.evaluation.target_accuracy, result["mlm_accuracy"]
        if target is not None and accuracy is not None and accuracy >= target:
            progress.target_reached = True
        self.mlperf.stop_evaluation(progress.sequences, accuracy, progress.target_reached)
        self.log.show_evaluation(result)
        if not progress.target_reached and progress.step < self.total_steps:
            self.mlperf.continue_training(progress.sequences)

    def _save(self) -> None:
        progress = self.progress
        progress.window = self.log.window.fold()
        if progress.window.get("steps"):
            self._check_loss(progress.window)
        self.log.note_costs()
        self.state.save(self.stages)
        self._saved_step = progress.step
        if not self.config.checkpoint.background:
            self.state.wait()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
