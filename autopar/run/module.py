"""The module that a user trains: an emitted module, its mesh, and this rank's part of the parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from autopar.debug import debug_level
from autopar.run import comm, record, state
from autopar.run.again import Again, Remembered
from autopar.run.alike import begin_writing, check_written
from autopar.run.alone import as_one_process
from autopar.run.as_original import AsOriginal
from autopar.run.asked import OF_GRADIENTS
from autopar.run.autocast import Autocast, ambient, without
from autopar.run.backward import FUNCTIONS, Backward
from autopar.run.batches import GivenBatches
from autopar.run.before_steps import BeforeSteps
from autopar.run.broken_off import broken_off
from autopar.run.buckets import Bucket, make_buckets, make_buckets_of_a_pass, make_units
from autopar.run.checkpointed import not_kept_for_later
from autopar.run.dtypes import dtype_named
from autopar.run.elsewhere import Standing
from autopar.run.form import Anew, Emitted, Form, Guards
from autopar.run.forms import Call, Forms
from autopar.run.full_states import whole_where_full
from autopar.run.gathered import GatheredWhereUsed, Orders, Units
from autopar.run.grad_mode import buffers_without_gradients, with_gradients
from autopar.run.input_gradients import InputGradients
from autopar.run.inputs import as_programs_take
from autopar.run.launch import default_device, join_process_group
from autopar.run.manifest import BufferSpec, Manifest, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.metrics import Metrics
from autopar.run.observed import Observed
from autopar.run.outputs import Returned, as_inner
from autopar.run.parametrized import is_kept
from autopar.run.precision import computing_in, inputs_in
from autopar.run.random_numbers import RandomNumbers
from autopar.run.reading import Reading
from autopar.run.region import regions_of
from autopar.run.scaling import Scaling
from autopar.run.schedule import Made, OpenRun
from autopar.run.stand_in import runs_as_it_is
from autopar.run.stepping import close_steps, hook_optimizers
from autopar.run.tree import REGISTRIES, Tree
from autopar.run.twice import Twice
from autopar.run.unread import Everything, Loss, Past, Unread, around, as_returned, left_at, once_more
from autopar.run.varying import Varying
from autopar.run.wanted import Wanted, kind_of
from autopar.run.weights import Step, Weights
from autopar.run.without_data import without_values

__all__ = ["Emitted", "ParallelModule"]

Another = Callable[["ParallelModule", Any, str, str, Varying], Anew]
CHECKED = 3  # calls, of which all ranks compare what they were given


class ParallelModule(AsOriginal):
    """A model that several processes train together, each with a part of it.

        loss = model(**batch)   # the global batch on every rank; the global loss on every rank
        loss.backward()         # reduces gradients; with a pipeline or micro-batches the rest of backward is done by now
        optimizer.step()        # on the parts of the parameters that rest here

    Under torch.no_grad() a call runs forward alone.

    It is the original model in another form: its submodules, parameters and buffers are the original's own objects, whose memory is
    now this rank's part (`parts`), and what is set on it is set on the original.

    emitted: the emitted module (MANIFEST, STAGES and perhaps prologue). tensors: global tensors by name, of the parameters,
    buffers and constants in the manifest; rank 0's are given to all ranks, and the other ranks' are not read. What is on the meta device
    there, and among `read` (None: all), must be written to before the first call.
    device: by default this process's GPU, or the CPU. local_batch: each data-parallel rank is given its own part of the
    batch. debug: before each step all ranks compare what they were given (also AUTOPAR_DEBUG=1), else in the first few calls.
    original: the user's model; without it the module has the names of its parameters alone. another: makes the form for other inputs or
    other modes. guards: of the captured program. returns: what the original's forward returns, in words; '' for the loss alone;
    returned: all of it, without its tensors, where these are computed; around_loss: where they are not. outputs: 'all': a call returns all
    that the original returns. Where that cannot run as it was planned and gradients are off, as for a call without labels, the original
    computes it, with whole parameters on every rank.
    autocast, dtype: under which torch.autocast the program was captured, and what float32 parameters are cast to where they are used.
    example: the inputs with which it was captured: in another call they may be one tensor where these are two, which code may ask.
    elsewhere: gives the places beside the original's registries in which its parameters and buffers stand.

    Collective: all ranks build it and call its methods together. Raises LaunchError if the number of processes is not
    that of the mesh, ValueError if `tensors` do not fit the manifest.
    """

    # All of these are kept from nn.Module's registry, which has the user's names alone.
    manifest: Manifest
    device: torch.device
    mesh: Mesh
    _debug: bool
    _tree: Tree
    _modules_of_original: tuple[nn.Module, ...]
    _parametrized: bool
    _buckets: tuple[Bucket, ...]
    _of_a_pass: tuple[Bucket, ...]
    _units: Units
    _orders: Orders
    _forms: Forms
    _ran: Form  # the last time
    _dtype: torch.dtype | None
    _returns: str
    _outputs: str
    _wanted: Wanted
    _before_steps: BeforeSteps
    _random: RandomNumbers
    _given: GivenBatches
    _scaling: Scaling
    _metrics: Metrics
    _calls: int
    _mode: bool
    plan: Any = None  # the Plan and the emitted source, where autopar.compile made this module
    source: str | None = None
    _copied: Callable[[Any], Any] | None = None  # a copy of the original -> it, compiled as this one

    def __init__(
        self,
        emitted: Emitted,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str | None = None,
        local_batch: bool = False,
        debug: bool | None = None,
        original: nn.Module | None = None,
        another: Another | None = None,
        guards: Guards | None = None,
        returns: str = "",
        returned: Returned | None = None,
        around_loss: Returned | None = None,
        outputs: str = "loss",
        autocast: tuple[Autocast, ...] = (),
        dtype: torch.dtype | None = None,
        example: Any = None,
        read: Collection[str] | None = None,
        elsewhere: Callable[[], Sequence[Standing]] = tuple,
    ) -> None:
        self.__dict__["original"] = None
        super().__init__()
        for function in FUNCTIONS:
            runs_as_it_is(function, "backward")
        runs_as_it_is(Unread, "read")
        manifest = emitted.MANIFEST
        keep = self.__dict__
        keep["manifest"] = manifest
        keep["device"] = device = torch.device(device) if device is not None else default_device()
        join_process_group(device)
        keep["mesh"] = mesh = Mesh(manifest.mesh, device, shard=manifest.shard, places=manifest.places)
        keep["_debug"] = debug if debug is not None else debug_level() >= 1
        keep["_returns"], keep["_outputs"] = returns, outputs
        if original is not None:
            self._stands_for(original)
            keep |= {name: original.__dict__[name] for name in REGISTRIES}
        keep["_parametrized"] = original is not None and any(map(parametrize.is_parametrized, original.modules()))
        keep["_modules_of_original"] = tuple(original.modules()) if original is not None else ()
        tied = {s: mesh.holding(s) for s in sorted({p.stages for p in manifest.params if len(mesh.pp_ranks(p.stages)) > 1})}
        keep["_tree"] = tree = Tree(self, manifest, mesh, device, tied, elsewhere)
        specs: list[ParamSpec | BufferSpec] = [*manifest.params, *(b for b in manifest.buffers if not b.region)]
        without = without_values(specs, tensors, mesh)
        tree.take(state.distribute(specs, tensors, mesh, device, without))
        tree.wait_for(without if read is None else without & set(read))
        tree.constants.update(regions_of(manifest, tensors, device))
        tree.asks_what_trains = guards is not None and any(map(guards.reads, OF_GRADIENTS))
        self._put_together()
        form = Form(
            emitted, tree.constants, mesh, device, local_batch=local_batch, guards=guards, returned=returned, around_loss=around_loss
        )
        if original is None:
            self.training = manifest.training
        keep["_dtype"] = dtype
        own = functools.partial(another, self) if another is not None else None
        keep["_forms"] = Forms(
            form, modes=self._modes(), autocast=autocast, original=original, another=own, whole=tree.gathered, example=example
        )
        keep["_wanted"] = Wanted(self._forms, outputs)
        keep["_before_steps"] = BeforeSteps(mesh, manifest.model, tree.params)
        keep["_random"] = RandomNumbers(mesh, device)
        keep["_calls"] = 0
        keep["_given"] = GivenBatches(mesh, local=local_batch)
        keep["_scaling"] = Scaling()
        keep["_metrics"] = Metrics(mesh.world if mesh.talks and not local_batch else 1, rank=mesh.rank)
        record.count_from(max(map(int, mesh.collected([str(record.calls())]))))
        begin_writing()
        hook_optimizers()
        whole_where_full()

    # --------------------------------------------------------------------------------------------------------- training
    def forward(self, *args: object, **kwargs: object) -> Any:
        """The loss of a batch (a scalar, the same on every rank). args, kwargs: those of the original model, with tensors of the global
        batch (where it was compiled with local_batch=True, of this rank's part). Where the original returns more than its loss, this is a
        tensor, the loss, that can be taken apart as what the original returns; the tensors beside the loss are computed when they are
        read, which all ranks do alike. With outputs='all', and where the original computes no loss: all that it returns,
        every tensor whole on every rank.

        Raises TypeError or ValueError naming the input that is missing, unknown or not as planned, or what of the model has changed
        in a way that was not planned for; LaunchError if ranks were given different batches (all compare those of the first calls; in
        debug mode of every call).
        """
        close_steps()
        if self._parametrized and is_kept():
            raise ValueError(
                f"{self.manifest.model} was called inside of torch.nn.utils.parametrize.cached(), which keeps what its weights are "
                f"computed to. Call it outside: the plan says what is kept"
            )
        record.step(self._calls + 1)
        check_written()
        record.phase(record.FORWARD)
        self._tree.begin_step()
        given = args, kwargs
        begun, form = record.count(), None
        try:
            args, kwargs = as_programs_take(args, kwargs)
            compared = self._debug or self._calls < CHECKED
            call = Call(
                args=args, kwargs=kwargs, given=given, modes=self._modes(), otherwise=self._tree.otherwise, compared=compared,
                outputs=self._outputs, autocast=ambient(),
            )  # fmt: skip
            form, call = self._wanted.form_of(call)
            self.__dict__["_calls"] += 1
            if form is None:
                returned = self._of_the_original(args, kwargs)
            else:
                with without(), not_kept_for_later():  # the program has the casts, and says what runs again
                    returned = self._run(form, call)
                if form.returned is not None:
                    returned = form.returned.given_back(returned, *given)
        except Exception as error:
            broken_off(error, begun, staged=self.mesh.pp.size > 1, lost=form is not None and form.under_way)
            record.fails()
            raise
        record.phase(record.OUTSIDE)
        return returned

    def _run(self, form: Form, call: Call) -> Any:
        mesh, tree = self.mesh, self._tree
        self.__dict__["_ran"] = form
        manifest = form.manifest
        numbers = call.numbers(form)
        bound = form.batch.bind(call.args, call.kwargs, form.varied, numbers)
        tree.write(form.guards.written(tree.gathered) if form.guards is not None else {})
        if self._debug or form.calls < CHECKED:
            form.batch.check_equal(bound)
        else:
            self._given.compare(bound.values())
        form.calls += 1
        self._metrics.look(self.training)
        if tree.otherwise and tree.train_also(manifest.params):
            self._put_together()
        rest = self._begun(form, bound, tree.trainable())
        step = rest.step
        differentiates = torch.is_grad_enabled() and bool(rest.leaves)
        if differentiates and not form.open and (mesh.pp.size > 1 or manifest.micro_batches > 1):
            step.begins_from = self._scaling.begin()
        for stage in form.stages.values():
            stage.train(self.training)
            stage.weights = Weights(step)
        made: Made = []
        run: OpenRun | None = None
        may_be_read = self._may_be_read(form)
        beside = differentiates and form.gives_more and not form.open  # gradients may come to it
        before = {name: tree.buffer(name).clone() for name in form.reread} if may_be_read or beside else {}
        tree.buffers.check_apart(form.in_place)
        tree.buffers.renew(form.assigned)
        try:
            with self._random.of_a_call(draws=manifest.draws):
                remembered = Remembered(form, tree, bound, rest, training=self.training) if differentiates or may_be_read else None
                twice = Twice(remembered) if remembered is not None and differentiates else None
                parts = form.micro_batches(rest.inputs.parts)
                if form.open and differentiates:
                    run = form.run_open(parts, step)
                else:
                    with rest.observed.listening():
                        loss = form.run(parts, step, made)
        finally:
            for stage in form.stages.values():
                del stage.weights  # so that gathered copies live no longer than the step
        form.spread(tree.buffer)
        if run is None and mesh.pp.size > 1:
            comm.broadcast_(loss, mesh.pp.ranks[manifest.places[-1]], mesh.pp)
        if not differentiates:
            step.finish()
        outputs: Mapping[str, Tensor] = {}
        everything: Reading[Everything] | None = None
        if form.returned is None:
            loss = rest.of_loss(loss, twice) if twice is not None else loss.detach()
            outputs = self._beside_loss(form, rest, made, call, remembered, twice, before)
            outputs = as_inner(outputs, outputs)
            if remembered is not None and may_be_read:
                everything = self._everything(call, remembered, loss, before)
                if form.around_loss is not None and not (form.guards is not None and form.guards.leaves):  # these are always held
                    self._before_steps.may_read(everything, kind_of(call), form.around_loss.size)
            returned = as_returned(loss, self._returns, around(loss, form.around_loss, everything))
        elif run is not None and remembered is not None and twice is not None:
            values = form.outputs.collected(run.made)
            outputs = form.returned.marked(rest.of_outputs(values, run, Again(remembered, self._begun), twice))
            returned = form.returned.put_together(None, outputs)
            where = self._wanted.trained(kind_of(call))
            if call.asked and self._outputs == "loss" and where is not None:
                own = where.loss_in(returned)  # of a call without labels there is none
                returned = as_returned(own, self._returns, returned) if isinstance(own, Tensor) else returned
        else:
            loss = rest.of_loss(loss, twice) if twice is not None else loss.detach()
            outputs = form.returned.marked(self._beside_loss(form, rest, made, call, remembered, twice, before))
            is_whole = form.open or form.returned.has_loss or not torch.is_grad_enabled()
            returned = form.returned.put_together(loss, outputs) if is_whole else loss
            if call.asked and form.returned.has_loss:
                returned = as_returned(loss, self._returns, returned)
        if form.guards is not None:
            form.guards.leave(outputs, None if everything is None else functools.partial(left_at, everything))
            form.varied.move(numbers)
        return returned

    def _beside_loss(
        self, form: Form, rest: Backward, made: Made, call: Call, remembered: Remembered | None, twice: Twice | None,
        before: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:  # fmt: skip
        """Collective. The outputs of a call beside its loss, by name."""
        values = form.outputs.collected(made)
        if not values or remembered is None or twice is None:
            return values
        trained = functools.partial(self._wanted.is_trained, kind_of(call), form)
        return rest.of_outputs_beside(values, Twice(remembered, beside=True, before=before), trained)

    def _may_be_read(self, form: Form) -> bool:
        """Whether the original returns or leaves more than its loss, which the form does not compute."""
        leaves = form.guards is not None and bool(form.guards.leaves)
        return self.original is not None and form.returned is None and (leaves or form.around_loss is not None)

    def _everything(self, call: Call, remembered: Remembered, loss: Tensor, before: Mapping[str, Tensor]) -> Reading[Everything]:
        """Computes what else the original returns and leaves in a call that has computed its loss alone. before: buffers that the call has
        changed and computes of, as they were."""
        past = Past(
            call=call, remembered=remembered, returns=self._returns, number=self._calls, loss=loss, came_to=loss.detach().clone(),
            before=before, grad=torch.is_grad_enabled(), inference=torch.is_inference_mode_enabled(),
        )  # fmt: skip

        def everything(why: str) -> Everything:
            with self._methods.let_through():
                trained = functools.partial(self._wanted.is_trained, past.kind)
                found = once_more(past, self._forms, self._begun, self._modes(), why, trained)
            self._wanted.is_read(past.kind)
            return found

        return Reading(everything)

    def _begun(
        self, form: Form, bound: Mapping[str, Tensor], trainable: Sequence[tuple[str, nn.Parameter]],
        before: Mapping[str, Tensor] | None = None,
    ) -> Backward:  # fmt: skip
        """The weights of a forward pass, and what is left of it for backward. before: buffers as they are to be in it."""
        tree, manifest = self._tree, form.manifest
        step = Step(
            held=tree.held,
            names=tree.names,
            buffer=functools.partial(self._buffer, others={**form.constants, **before} if before else form.constants),
            computes=form.computes,
            buckets=self._buckets,
            of_a_pass=self._of_a_pass,
            where_used=GatheredWhereUsed(self._units, self._orders, form.computes),
            leaves=tree.leaves,
            passes=manifest.micro_batches,
        )
        differentiated = InputGradients(manifest.inputs, bound, form.batch.own_parts(bound), self.mesh, local=form.batch.local)
        step.first_stage = 0 if differentiated.given else form.first_stage(trainable)
        return Backward(
            form=form, tree=tree, step=step, trainable=trainable, inputs=differentiated, reached_in=form.begin(),
            observed=Observed(form.regions, self.mesh, self.device), given=self._given, scaling=self._scaling,
        )

    def _put_together(self) -> None:
        """In which parameters are gathered and reduced together."""
        held, mesh, keep = self._tree.held.values(), self.mesh, self.__dict__
        keep["_buckets"] = make_buckets(held, mesh)
        keep["_of_a_pass"] = make_buckets_of_a_pass(held, mesh)
        keep["_units"] = Units(make_units(held, mesh))
        keep["_orders"] = {}

    def _of_the_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collective: what the original returns for the batch, computed on every rank with whole parameters."""
        assert self.original is not None, "what it computes was captured"
        given = pytree.tree_map_only(Tensor, lambda t: t.to(self.device), inputs_in(self._dtype, (args, kwargs)))
        whole = self._tree.as_whole(write=False, buffers=True)
        alone = as_one_process(), buffers_without_gradients(self.original)
        with whole, computing_in(self._dtype, self.original), self._random.of_a_call(), alone[0], alone[1]:
            return self.original(*given[0], **given[1])

    def train_step(self, *args: object, **kwargs: object) -> Tensor:
        """Collective: forward and backward of a batch (args, kwargs: as in a call; a single mapping is taken as keyword inputs); returns
        the loss, a scalar, detached. Raises as a call does, and ValueError for a model that returns no loss."""
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            return ParallelModule.train_step(self, **args[0])
        result = self(*args, **kwargs)
        returned = self._ran.returned
        loss: Tensor = result
        trained = self._wanted.trained((self.training, torch.is_grad_enabled()))
        if self._ran.open and trained is None:
            raise ValueError(f"{self.manifest.model} returns no loss, and train_step needs one: compile it with loss=fn")
        if returned is not None and not isinstance(result, Loss):
            returned = trained or returned
            loss = returned.loss_in(result) if returned.has_loss else loss
        loss.backward()
        return loss.detach()

    def profile(self, *args: object, steps: int = 3, **kwargs: object) -> Any:
        """Collective: the seconds and bytes of `steps` forward and backward passes of a batch (args, kwargs: as in a call), after one that
        is not counted, beside what the plan predicted (`autopar.watch.Profiled`; printed, a table), and of one more under torch.profiler,
        by rank: `.save("run.json")` writes them for `autopar explain plan.json --measured run.json`. Gradients, buffers and random numbers
        are afterwards what they were. ValueError if `steps` is not positive; else raises as a call does."""
        watch = importlib.import_module("autopar.watch")  # which knows the planner
        return watch.profiled(self, args, kwargs, steps=steps)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective: scale all gradients so that the norm of them all is at most max_norm; returns the norm before it, a scalar of the
        widest dtype of the parameters, the same on every rank. norm_type: 2.0, 1.0, inf, ... The figures are those of
        torch.nn.utils.clip_grad_norm_ on the original model."""
        dtype = functools.reduce(torch.promote_types, (dtype_named(spec.dtype) for spec in self.manifest.params))
        if not norm_type > 0:  # of 0 or below, norms of parts do not add up to one
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type).to(dtype)
        return state.clip_grad_norm_(
            self._tree.held.values(), self.mesh, max_norm=max_norm, norm_type=norm_type, dtype=dtype, device=self.device
        )

    @property
    def data_ranks(self) -> int:
        """Into how many parts the data is divided among the ranks: 1 where every rank is given the global batch."""
        return self.mesh.dp.size if self._forms.first.batch.local else 1

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank is given; ranks of one tensor-parallel group or pipeline are given the same."""
        return self.mesh.dp.rank if self._forms.first.batch.local else 0

    # ------------------------------------------------------------------------------------------------------------ state
    @property
    def random_stream(self) -> tuple[int, int]:
        """Where the module's own random numbers are: their seed, and how many calls have been made since it was set. Both begin anew
        where the process's generator has just been seeded."""
        return self._random.stream

    @random_stream.setter
    def random_stream(self, stream: tuple[int, int]) -> None:
        self._random.stream = stream

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Collective: a parallel module of a deep copy of the original, under the same plan. Each rank needs the memory of the whole model
        for it. What is copied with it and holds its parameters (an optimizer) holds the copy's."""
        if self._copied is None or self.original is None:
            self._refuse_copy("copied")
        own = _tensors_of(self.original)
        if known := next((name for name, tensor in own.items() if id(tensor) in memo), None):
            raise ValueError(
                f"{self.manifest.model} is copied together with what holds its parameters ({known}), and after it: the copy of that would "
                f"hold others than the copy of the model. Copy the model first: it is to stand before its optimizer in what is copied"
            )
        with self.full_parameters(write=False):
            whole = copy.deepcopy(self.original, memo)
        with with_gradients():
            found = self._copied(whole)
        copies = _tensors_of(whole)
        memo.update((id(tensor), copies[name]) for name, tensor in own.items())
        return found

    @contextlib.contextmanager
    def by_the_original_where_unplanned(self) -> Iterator[None]:
        """Inside, and under torch.no_grad(), calls without a loss that cannot run as they were planned are computed by the original with
        whole parameters on every rank, too; as in any case with outputs='all'."""
        outputs = self._outputs
        self.__dict__["_outputs"] = "all"
        try:
            yield
        finally:
            self.__dict__["_outputs"] = outputs

    @contextlib.contextmanager
    def captured_at_home(self) -> Iterator[None]:
        """Collective: inside, the original may be captured: whole, and on the devices where it was."""
        with self._tree.as_whole(write=False, home=True):
            yield

    @contextlib.contextmanager
    def trained_as_planned(self) -> Iterator[bool]:
        """Inside, the original is captured as if what is frozen were not, if the plan has it train. Gives whether that is anything else."""
        tree, otherwise = self._tree, self._tree.otherwise
        tree.otherwise = tree.unfrozen
        try:
            yield tree.otherwise != otherwise
        finally:
            tree.otherwise = otherwise

    # ---------------------------------------------------------------------------------------------------------- private
    def _runs_calls_of_methods(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._tree.whole or record.computes() or torch.compiler.is_compiling():
            return False
        form = self._forms.first
        if self._returns and self._outputs == "loss" and not form.open and form.around_loss is None:
            self._methods.tell(
                f"was compiled for its loss alone, and a method of it calls it, which may use more of what it returns ({self._returns}): "
                f"every rank computes all of such a call. Compile it with outputs='all', and it runs as it was planned"
            )
            return False
        return True

    def _modes(self) -> bytes:
        """Of the module and each of its submodules, whether it trains."""
        return bytes(m.training for m in self._modules_of_original) if self.original is not None else bytes([self.training])

    def _buffer(self, name: str, others: Mapping[str, Tensor]) -> Tensor:
        return others[name] if name in others else self._tree.buffer(name)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, by each of their names."""
    named = (nn.Module.named_parameters, nn.Module.named_buffers)
    return {name: tensor for of in named for name, tensor in of(model, remove_duplicate=False)}
