"""The graph of an ensemble, compiled when it is loaded: the tensors of each step, scopes, and order."""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from inferd._native.request.signature cimport str_copy


# ---------------------------------------------------------------------------------------------------------------------
# The analysis, in Python: it happens once for each load

class PlanError(ValueError):
    """The graph cannot be served; `step` is the step that shows it."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


class Analysis:
    """The graph of an ensemble, with numbers for names, and the facts that its edges imply.

    Attributes:
        tensors: names, those of the ensemble's inputs first.
        order: steps, each behind those whose tensors it reads.
        scopes: the scope around each scope; -1 for the first, which is the request as a whole.
        step_scope, tensor_scope: where each step runs and where each tensor lives.
        opens: the scope that each response of a decoupled step opens; -1 for other steps.
    """

    def __init__(self, spec):
        self.steps = spec.ensemble.steps
        self.tensors = list(dict.fromkeys(
            [tensor.name for tensor in spec.inputs]
            + [name for step in self.steps for name in step.outputs.values()]))
        self.number = {name: number for number, name in enumerate(self.tensors)}
        self.reads = [self.numbers(index, [*step.inputs.values(), *([step.gate] if step.gate else [])])
                      for index, step in enumerate(self.steps)]
        self.writes = [self.numbers(index, step.outputs.values()) for index, step in enumerate(self.steps)]
        self.writers = [[] for _ in self.tensors]
        for index, written in enumerate(self.writes):
            for tensor in written:
                self.writers[tensor].append(index)
        self.order = self.sorted_steps()
        self.find_scopes()

    def numbers(self, index, names):
        missing = [name for name in names if name not in self.number]
        if missing:
            raise PlanError(f"step of model '{self.steps[index].model}' reads '{missing[0]}', which nothing writes",
                            index)
        return list(dict.fromkeys(self.number[name] for name in names))

    def sorted_steps(self):
        """Kahn's algorithm; raises PlanError for a cycle."""
        waits = [{writer for tensor in reads for writer in self.writers[tensor]} for reads in self.reads]
        order = [index for index, before in enumerate(waits) if not before]
        for done in order:
            for index, before in enumerate(waits):
                if done in before:
                    before.remove(done)
                    if not before:
                        order.append(index)
        if len(order) < len(self.steps):
            stuck = next(index for index, before in enumerate(waits) if before)
            raise PlanError(f"step of model '{self.steps[stuck].model}' depends on itself", stuck)
        return order

    def find_scopes(self):
        self.scopes = [-1]
        self.step_scope = [0] * len(self.steps)
        self.tensor_scope = [-1 if writers else 0 for writers in self.writers]
        self.opens = [-1] * len(self.steps)
        for index in self.order:
            around = {self.tensor_scope[tensor] for tensor in self.reads[index]}
            scope = max(around, key=lambda each: len(self.path(each)))
            if not around <= set(self.path(scope)):
                raise PlanError(f"step of model '{self.steps[index].model}' receives inputs originated from different "
                                "decoupled models", index)
            self.step_scope[index] = scope
            if self.steps[index].decoupled:
                self.opens[index] = len(self.scopes)
                self.scopes.append(scope)
                scope = self.opens[index]
            for tensor in self.writes[index]:
                if self.tensor_scope[tensor] not in (-1, scope):
                    raise PlanError(f"the steps that write tensor '{self.tensors[tensor]}' run at different times: "
                                    "before, and for each response of a decoupled step", index)
                self.tensor_scope[tensor] = scope

    def path(self, scope):
        """A scope and those around it, from the inside."""
        path = []
        while scope >= 0:
            path.append(scope)
            scope = self.scopes[scope]
        return path


# ---------------------------------------------------------------------------------------------------------------------
# The analysis in C

cdef void *zeroed(size_t count, size_t size) except NULL:
    cdef void *data = calloc(count if count else 1, size)
    if data == NULL:
        raise MemoryError
    return data


cdef int numbers_copy(uint32_t **out, uint32_t *count, object numbers) except -1:
    cdef uint32_t i
    out[0] = <uint32_t *>zeroed(len(numbers), sizeof(uint32_t))
    count[0] = <uint32_t>len(numbers)
    for i in range(count[0]):
        out[0][i] = numbers[i]
    return 0


cdef int edges_build(PlanEdge **out, uint32_t *count, object mapping, object optional, object number) except -1:
    cdef uint32_t i = 0
    out[0] = <PlanEdge *>zeroed(len(mapping), sizeof(PlanEdge))
    count[0] = <uint32_t>len(mapping)
    for name, tensor in mapping.items():
        str_copy(&out[0][i].name, name)
        out[0][i].tensor = number[tensor]
        out[0][i].optional = name in optional
        out[0][i].place = i
        i += 1
    return 0


cdef int step_build(PlanStep *out, object found, uint32_t index) except -1:
    cdef object step = found.steps[index]
    str_copy(&out.model, step.model)
    str_copy(&out.version, str(step.version) if step.version >= 0 else "")
    edges_build(&out.inputs, &out.input_count, step.inputs, step.optional, found.number)
    edges_build(&out.outputs, &out.output_count, step.outputs, (), found.number)
    out.gate = found.number[step.gate] if step.gate else -1
    out.inverted = step.gate_inverted
    out.either = any(len(found.writers[tensor]) > 1 for tensor in found.writes[index])
    numbers_copy(&out.reads, &out.read_count, found.reads[index])
    out.scope = found.step_scope[index]
    out.opens = found.opens[index]
    return 0


cdef int tensor_build(PlanTensor *out, object found, uint32_t index, dict outputs) except -1:
    cdef list readers = [step for step, reads in enumerate(found.reads) if index in reads]
    str_copy(&out.name, found.tensors[index])
    out.scope = found.tensor_scope[index]
    out.output = outputs.get(found.tensors[index], -1)
    out.writers = <uint32_t>len(found.writers[index])
    numbers_copy(&out.readers, &out.reader_count, readers)
    out.pinned = any(found.step_scope[step] != out.scope for step in readers)
    return 0


cdef int scope_build(EnsemblePlan *plan, object found, uint32_t index) except -1:
    cdef PlanScope *out = &plan.scopes[index]
    cdef uint32_t i
    out.parent = found.scopes[index]
    numbers_copy(&out.steps, &out.step_count, [i for i, scope in enumerate(found.step_scope) if scope == index])
    numbers_copy(&out.tensors, &out.tensor_count, [i for i, scope in enumerate(found.tensor_scope) if scope == index])
    for i in range(out.step_count):
        plan.steps[out.steps[i]].place = i
    for i in range(out.tensor_count):
        plan.tensors[out.tensors[i]].place = i
    return 0


cdef int plan_build(EnsemblePlan *plan, object spec) except -1:
    cdef object found = Analysis(spec)
    cdef dict outputs = {tensor.name: number for number, tensor in enumerate(spec.outputs)}
    cdef uint32_t i
    memset(plan, 0, sizeof(EnsemblePlan))
    try:
        plan.steps = <PlanStep *>zeroed(len(found.steps), sizeof(PlanStep))
        plan.step_count = <uint32_t>len(found.steps)
        plan.tensors = <PlanTensor *>zeroed(len(found.tensors), sizeof(PlanTensor))
        plan.tensor_count = <uint32_t>len(found.tensors)
        plan.scopes = <PlanScope *>zeroed(len(found.scopes), sizeof(PlanScope))
        plan.scope_count = <uint32_t>len(found.scopes)
        for i in range(plan.step_count):
            step_build(&plan.steps[i], found, i)
        for i in range(plan.tensor_count):
            tensor_build(&plan.tensors[i], found, i, outputs)
        for i in range(plan.scope_count):
            scope_build(plan, found, i)
        numbers_copy(&plan.order, &plan.step_count, found.order)
        numbers_copy(&plan.inputs, &plan.input_count, [found.number[tensor.name] for tensor in spec.inputs])
        missing = [name for name in outputs if name not in found.number]
        if missing:
            raise ValueError(f"output '{missing[0]}' is not written")
        numbers_copy(&plan.outputs, &plan.output_count, [found.number[tensor.name] for tensor in spec.outputs])
    except BaseException:
        plan_clear(plan)
        raise
    return 0


cdef void edges_clear(PlanEdge *edges, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        free(<void *>edges[i].name.data)
    free(edges)


cdef void plan_clear(EnsemblePlan *plan) noexcept nogil:
    cdef uint32_t i
    for i in range(plan.step_count):
        free(<void *>plan.steps[i].model.data)
        free(<void *>plan.steps[i].version.data)
        edges_clear(plan.steps[i].inputs, plan.steps[i].input_count)
        edges_clear(plan.steps[i].outputs, plan.steps[i].output_count)
        free(plan.steps[i].reads)
    for i in range(plan.tensor_count):
        free(<void *>plan.tensors[i].name.data)
        free(plan.tensors[i].readers)
    for i in range(plan.scope_count):
        free(plan.scopes[i].steps)
        free(plan.scopes[i].tensors)
    free(plan.steps)
    free(plan.tensors)
    free(plan.scopes)
    free(plan.order)
    free(plan.inputs)
    free(plan.outputs)
    memset(plan, 0, sizeof(EnsemblePlan))


# ---------------------------------------------------------------------------------------------------------------------
# Questions

cdef void plan_needs(const EnsemblePlan *plan, const uint8_t *outputs, uint8_t *tensors, uint8_t *steps) noexcept nogil:
    # backwards from the outputs, so that every reader of a tensor has been seen before its writer
    cdef const PlanStep *step
    cdef uint32_t i, j
    memset(tensors, 0, plan.tensor_count)
    memset(steps, 0, plan.step_count)
    for i in range(plan.output_count):
        if outputs[i]:
            tensors[plan.outputs[i]] = 1
    i = plan.step_count
    while i:
        i -= 1
        step = &plan.steps[plan.order[i]]
        for j in range(step.output_count):
            if tensors[step.outputs[j].tensor]:
                steps[plan.order[i]] = 1
        if steps[plan.order[i]]:
            for j in range(step.read_count):
                tensors[step.reads[j]] = 1


cdef bint plan_encloses(const EnsemblePlan *plan, uint32_t outer, uint32_t inner) noexcept nogil:
    cdef int32_t scope = <int32_t>inner
    while scope >= 0:
        if <uint32_t>scope == outer:
            return True
        scope = plan.scopes[scope].parent
    return False
