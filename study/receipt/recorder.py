"""A receipt in the program of `study verify --mine`: it compares each step with plain training.

The program runs as it is under its own launcher. Before each optimizer step a rank repeats its passes on a plain copy
of the model (replay.py) and compares outputs, gradients and norm; after it, the update with torch's optimizer. Each
step begins with the program's own weights, so that rounding does not grow and the first difference has its place. The
program ends after the last step, or the first that differs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from study.compositions.reference import MIN_HALF_ULPS
from study.compositions.trace import plain_name
from study.config.errors import first_line, replace_unprintable
from study.metrics.inventory import dtensor_type
from study.receipt import live_engine
from study.receipt.failures import WrongUse
from study.receipt.mine_record import RECORD_VARIABLE, STEPS_VARIABLE, RankRecord, RecordedStep
from study.receipt.obstacles import FP16, NotComparable, find_obstacle
from study.receipt.passes import PassRecorder, RecordedPass, loss_weights
from study.receipt.plain_copy import copy_plain
from study.receipt.plain_optimizer import PlainOptimizer, plain_class
from study.receipt.replay import PlainReplay, PlainStep, sample
from study.receipt.step_comparison import StepComparison
from study.receipt.update_hooks import UpdateHooks, clip_factor
from study.receipt.whole_tensors import Tensors, whole_tensors
from study.receipt.wrong_uses import check_engine

# The exit status of a rank that cannot compare: launchers end the other ranks then.
_NOT_COMPARABLE = 87


def start_recording(model: Any, optimizer: Any) -> None:
    """Compare the steps of this process with plain training; a second receipt changes nothing."""
    if MineRecorder.first is None:
        MineRecorder.first = MineRecorder(model, optimizer)


class MineRecorder:
    """Comparison of one program's steps with plain training, on one rank."""

    first: MineRecorder | None = None

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._folder = Path(os.environ[RECORD_VARIABLE])
        self._wanted = int(os.environ[STEPS_VARIABLE])
        is_distributed = dist.is_initialized()
        self._record = RankRecord(
            rank=dist.get_rank() if is_distributed else 0,
            ranks=dist.get_world_size() if is_distributed else 1,
        )
        self._comparison = StepComparison()
        self._plain_optimizer: PlainOptimizer | None = None
        self._replay: PlainReplay | None = None
        self._rounding = 0.0
        # Weights that the optimizer does not have, as they were at the first step.
        self._ungrouped: Tensors = {}
        # Samples of the gradients of the step before.
        self._last_gradients: Tensors = {}
        with self._guarded("setting up"):
            self._prepare(model, optimizer)
        atexit.register(self._note_end)
        self._save()

    # --- Setting up.

    def _prepare(self, model: Any, optimizer: Any) -> None:
        if not isinstance(model, nn.Module):
            raise NotComparable(f"the receipt has a {type(model).__name__} in place of a model")
        self._first_model, self._first_engine = model, live_engine.find_kind(live_engine.find_engine(model))
        self._model = live_engine.find_engine(model)
        optimizer = optimizer if optimizer is not None else getattr(self._model, "optimizer", None)
        if optimizer is None:
            raise NotComparable("the receipt has no optimizer: give it the one that steps, Receipt(model, optimizer)")
        self._inner = _called_module(live_engine.find_inner(self._model))
        self._device = live_engine.find_device(self._model)
        if (obstacle := find_obstacle(self._model, self._inner)) is not None:
            raise NotComparable(obstacle)
        self._tensors = whole_tensors(self._model, self._inner, optimizer)
        self._passes = PassRecorder(self._inner, self._device)
        self._note_facts()
        self._prepare_update()
        self._hooks = UpdateHooks(self._tensors, self._before_update, self._after_update)

    def _note_facts(self) -> None:
        optimizer = self._tensors.optimizer
        facts, model = live_engine.read_facts(self._model, optimizer), live_engine.read_model(self._model)
        stage = f" stage {facts.zero_stage}" if facts.zero_stage is not None else ""
        group = optimizer.param_groups[0]
        settings = ", ".join(f"{key}={group[key]:g}" for key in ("lr", "weight_decay") if key in group)
        self._update(
            model=model.name,
            engine=f"{facts.engine}{stage}",
            precision=str(self._tensors.compute_dtype or facts.param_dtype).removeprefix("torch."),
            optimizer=f"{type(optimizer).__name__}({settings})",
            trained_parameters=model.trained_parameters,
            trained_tensors=len(self._tensors.trained),
        )

    def _prepare_update(self) -> None:
        """Make torch's optimizer, or note why updates are not compared."""
        optimizer = self._tensors.optimizer
        groups, masters = self._tensors.find_groups(), self._tensors.read_masters()
        reason = None
        if plain_class(optimizer) is None:
            reason = f"{type(optimizer).__name__} is not computed here"
        elif any(optimizer.state.values()):
            reason = "the optimizer had made steps before the receipt"
        elif groups is None:
            reason = "not every weight has its settings in the optimizer"
        elif masters is None:
            reason = "the engine's fp32 weights cannot be read"
        else:
            self._plain_optimizer = PlainOptimizer(optimizer, groups, masters)
        if reason is not None:
            self._update(left_out=(f"updates of weights: {reason}",))

    def _make_replay(self) -> PlainReplay:
        """Return the plain copy of the model, with separate memory for weights that are trained or sharded."""
        tensors = self._tensors
        dtype = tensors.compute_dtype
        with tensors.gathered():
            copies = {
                name: _copy_parameter(parameter, tensors.shape(parameter), dtype, self._device)
                for name, parameter in tensors.parameters.items()
            }
            by_id = {id(parameter): copies[name] for name, parameter in tensors.parameters.items()}
            plain = copy_plain(self._inner, by_id)
        return PlainReplay(plain, copies, self._device)

    # --- One step.

    def _before_update(self) -> None:
        with self._guarded("comparing gradients"), self._paused():
            passes = self._passes.take()
            self._check_passes(passes)
            if not self._over_ranks(len(passes), dist.ReduceOp.SUM):
                raise NotComparable("no forward pass of the receipt's model was backpropagated before the optimizer")
            self._comparison.step += 1
            self._replay = self._replay or self._make_replay()
            self._rounding = self._replay.rounding(passes)
            local = self._tensors.read_weights()
            weights = self._weights_of_rank_0(local)
            plain = self._plain = self._replay.run(weights, passes)
            if not torch.isfinite(torch.tensor(plain.norm)):
                raise NotComparable("gradients are not finite in plain training either")
            least = MIN_HALF_ULPS * self._rounding
            self._note_unchanged()
            self._comparison.compare("start", local, weights, dict.fromkeys(weights, least))
            self._comparison.compare_outputs(passes, plain)
            self._compare_gradients(weights, passes, plain)
            if self._plain_optimizer is not None:
                self._before = self._tensors.read_masters()
                self._plain_optimizer.note_settings()
            self._note_step(passes, plain)

    def _note_unchanged(self) -> None:
        """Note the weights that this optimizer does not have, and that none has changed since the first step."""
        tensors = self._tensors
        # In their stored type, since bf16 may round a small change away.
        with tensors.gathered():
            weights = {name: tensors.weight(tensors.trained[name]).clone() for name in tensors.find_ungrouped()}
        if self._comparison.step == 1:
            self._ungrouped = weights
            return
        unchanged = [name for name, first in self._ungrouped.items() if torch.equal(first, weights[name])]
        self._update(unchanged=tuple(unchanged))

    def _check_passes(self, passes: list[RecordedPass]) -> None:
        check_engine(self._first_model, self._first_engine)
        if (name := self._passes.outside) is not None:
            raise NotComparable(f"the program calls {plain_name(name)} outside of the model's forward pass")
        if self._hooks.obstacle is not None:
            raise NotComparable(self._hooks.obstacle)
        if any(it.autocast is not None and it.autocast[1] and it.autocast[2] is torch.float16 for it in passes):
            raise NotComparable(FP16)

    def _compare_gradients(self, weights: Tensors, passes: list[RecordedPass], plain: PlainStep) -> None:
        """Compare gradients before clipping, then the norm and clipping; note the gradients of the update."""
        comparison, hooks, tensors = self._comparison, self._hooks, self._tensors
        factor = clip_factor(plain.norm, hooks.max_norm)
        final = tensors.read_gradients()
        unclipped = {name: tensors.gather(gradient) for name, gradient in hooks.unclipped.items()} or final
        is_clipped = unclipped is final and not tensors.is_unclipped
        # FSDP's first version has clipped already.
        reference = _scaled(plain.gradients, factor) if is_clipped else plain.gradients
        comparison.compare("gradient", _with_zeros(unclipped, reference), reference, plain.allowed_gradients)
        self._explain_gradient(unclipped, weights, passes)
        self._find_last_gradient(unclipped, reference)
        if unclipped is not final and hooks.max_norm is None:
            self._note_changed_gradients(unclipped, final)
        if tensors.is_unclipped:
            # DeepSpeed clips within its step.
            self._gradients_of_update = _scaled(final, factor)
            return
        self._gradients_of_update = final
        comparison.compare_norm(hooks.norm, plain.norm, plain.allowed_norm)
        if hooks.max_norm is not None and not is_clipped:
            allowed = {name: bound + plain.allowed_norm for name, bound in plain.allowed_gradients.items()}
            comparison.compare("clipping", final, _scaled(unclipped, factor), allowed)

    def _explain_gradient(self, unclipped: Tensors, weights: Tensors, passes: list[RecordedPass]) -> None:
        """Look for the micro-batches in the first gradient that differs on any rank."""
        assert self._replay is not None
        names = list(self._tensors.trained)
        wrong = self._comparison.wrong_gradient
        place = self._over_ranks(-1 if wrong is None else names.index(wrong), dist.ReduceOp.MAX)
        if place < 0:
            return
        parts = self._replay.split_gradient(weights, passes, names[place])
        if wrong == names[place] and wrong in unclipped:
            self._comparison.explain_gradient(sample(unclipped[wrong]), parts)

    def _find_last_gradient(self, unclipped: Tensors, reference: Tensors) -> None:
        """Look for the gradient of the step before in the first one that differs."""
        name, last = self._comparison.wrong_gradient, self._last_gradients
        if name in last and name in unclipped:
            self._comparison.explain_by_last_step(sample(unclipped[name]) - sample(reference[name]), last[name])
        self._last_gradients = {name: sample(gradient).clone() for name, gradient in unclipped.items()}

    def _note_changed_gradients(self, unclipped: Tensors, final: Tensors) -> None:
        """Note that the program changes gradients before the step in a way that is not known here."""
        if any(not torch.equal(gradient, final[name]) for name, gradient in unclipped.items() if name in final):
            text = "changes of gradients between the last backward pass and the step, which are the program's own"
            self._update(left_out=tuple(dict.fromkeys((*self._record.left_out, text))))

    def _after_update(self) -> None:
        with self._guarded("comparing the update"), self._paused():
            self._comparison.compare_norm(self._hooks.norm, self._plain.norm, self._plain.allowed_norm)
            if self._plain_optimizer is not None and self._before is not None:
                self._compare_update(self._plain_optimizer, self._before)
            self._finish_step()

    def _compare_update(self, optimizer: PlainOptimizer, before: Tensors) -> None:
        exact, allowed = optimizer.step(before, self._gradients_of_update, self._rounding)
        after = self._tensors.read_masters()
        assert after is not None
        updates = {name: weight - before[name] for name, weight in after.items()}
        reference = {name: weight - before[name] for name, weight in exact.items()}
        self._comparison.compare("update", updates, reference, allowed)
        # The next passes use the weights that the optimizer has made.
        local = self._tensors.read_weights()
        cast = {name: weight.to(local[name].dtype) for name, weight in after.items()}
        least = MIN_HALF_ULPS * self._rounding
        self._comparison.compare("weight", {name: local[name] for name in cast}, cast, dict.fromkeys(cast, least))

    def _finish_step(self) -> None:
        last = self._record.steps[-1].model_copy(update={"norm": self._hooks.norm})
        self._update(steps=(*self._record.steps[:-1], last), difference=self._comparison.difference)
        self._hooks.reset()
        differs = self._over_ranks(int(self._comparison.difference is not None), dist.ReduceOp.MAX)
        if differs or len(self._record.steps) >= self._wanted:
            self._update(state="complete")
            self._save()
            if self._record.ranks > 1:
                # No rank leaves before all have the sum. The first to leave closes connections that others read.
                with contextlib.suppress(RuntimeError):
                    dist.barrier()
            _leave(0)
        self._save()

    def _note_end(self) -> None:
        """Note why the program has ended without a step."""
        if self._record.state == "begun" and not self._record.steps:
            with contextlib.suppress(Exception):
                try:
                    check_engine(self._first_model, self._first_engine)
                except WrongUse as error:
                    self._update(state="not comparable", reason=str(error))
        self._save()

    # --- Between ranks.

    def _weights_of_rank_0(self, weights: Tensors) -> Tensors:
        if self._record.ranks == 1:
            return weights
        copies = {name: weight.detach().clone() for name, weight in weights.items()}
        for weight in copies.values():
            dist.broadcast(weight, 0)
        return copies

    def _over_ranks(self, number: int, operation: Any) -> int:
        tensor = torch.tensor([number], device=self._device)
        if self._record.ranks > 1:
            dist.all_reduce(tensor, operation)
        return int(tensor)

    # --- The record.

    def _note_step(self, passes: list[RecordedPass], plain: PlainStep) -> None:
        weights = tuple(loss_weights(passes))
        has_losses = len(weights) == len(passes) > 0
        step = RecordedStep(
            loss=_loss(passes, [it.outputs for it in passes]) if has_losses else None,
            plain_loss=_loss(passes, plain.outputs) if has_losses else None,
            norm=None,
            plain_norm=plain.norm,
            loss_weights=weights if has_losses else None,
            divides_by_tokens=any(it.divides_by_tokens for it in passes),
            inputs_sha256=tuple(it.hash_inputs() for it in passes),
        )
        self._update(steps=(*self._record.steps, step))

    def _update(self, **changes: Any) -> None:
        self._record = self._record.model_copy(update=changes)

    def _save(self) -> None:
        self._record.write(self._folder)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Enclose passes that are not the program's."""
        self._hooks.is_paused = True
        try:
            yield
        finally:
            self._hooks.is_paused = False

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """End the program with the reason if it cannot be compared."""
        try:
            yield
        except (NotComparable, WrongUse) as obstacle:
            reason = str(obstacle)
        except Exception as error:
            reason = f"{doing}: {type(error).__name__}: {first_line(error)}"
        else:
            return
        self._update(state="not comparable", reason=replace_unprintable(reason[:300]))
        self._save()
        _leave(_NOT_COMPARABLE)


def _loss(passes: list[RecordedPass], outputs: list[Tensors]) -> float:
    """Return the mean of the micro-batches' losses, or their weighted sum if tokens divide them."""
    losses = [float(output[it.losses[0]]) for it, output in zip(passes, outputs, strict=True)]
    if any(it.divides_by_tokens for it in passes):
        return sum(weight * loss for weight, loss in zip(loss_weights(passes), losses, strict=True))
    return sum(losses) / len(losses)


def _called_module(inner: nn.Module) -> nn.Module:
    """Return the module whose passes are repeated: of a LightningModule, whose training_step logs, its model."""
    if not live_engine.is_lightning(inner):
        return inner
    core = live_engine.find_core(inner)
    if core is inner:
        raise NotComparable("the LightningModule has no model of transformers with all of its parameters")
    return core


def _copy_parameter(parameter: Any, shape: torch.Size, dtype: torch.dtype | None, device: torch.device) -> nn.Parameter:
    is_sharded = isinstance(parameter, dtensor_type()) or hasattr(parameter, "ds_id") or dtype is not None
    if not parameter.requires_grad and not is_sharded and parameter.device == device:
        frozen: nn.Parameter = parameter
        return frozen
    empty = torch.empty(shape, dtype=dtype or parameter.dtype, device=device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: tensor * factor for name, tensor in tensors.items()}


def _with_zeros(gradients: Tensors, reference: Tensors) -> Tensors:
    """Return gradients with zeros in place of those that do not exist."""
    return {name: gradients[name] if name in gradients else torch.zeros_like(it) for name, it in reference.items()}


def _leave(status: int) -> NoReturn:
    """End this process now: no checkpoint is written, and no later step begins."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
