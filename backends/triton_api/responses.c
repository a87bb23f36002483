/* Responses, response factories, and the states of sequences. */

#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <string.h>

#include "objects.h"

static TRITONSERVER_Error *no_memory(const char *what) {
    return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for %s", what);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Tensors */

static struct Tensor *made(const char *name, TRITONSERVER_DataType datatype, const int64_t *shape, uint32_t rank) {
    size_t size = strlen(name) + 1;
    struct Tensor *tensor = calloc(1, sizeof *tensor + size);
    if (tensor == NULL) return NULL;
    tensor->name = memcpy(tensor + 1, name, size);
    tensor->datatype = datatype;
    tensor->rank = rank;
    if (rank) memcpy(tensor->shape, shape, rank * sizeof *shape);
    return tensor;
}

static void free_base(struct Tensor *tensor) {
    if (tensor->granted)
        atomic_fetch_sub_explicit(&tensor->request->grant->tensors, 1, memory_order_acq_rel);
    else if (!tensor->shared)
        free(tensor->base);
    tensor->granted = false;
    tensor->base = NULL;
}

void inferd_free_tensors(struct Tensor *first) {
    while (first) {
        struct Tensor *next = first->next;
        free_base(first);
        free(first);
        first = next;
    }
}

TRITONSERVER_Error *inferd_new_tensor(struct Tensor **tensor, const char *kind, const char *name,
                                      TRITONSERVER_DataType datatype, const int64_t *shape, uint64_t rank) {
    *tensor = NULL;
    if (name == NULL || *name == 0) return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "%s without a name", kind);
    if (datatype <= TRITONSERVER_TYPE_INVALID || datatype > TRITONSERVER_TYPE_BF16)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "%s '%s' has datatype %d: expected one from 1 to 14", kind,
                             name, (int)datatype);
    if (rank > MOST_DIMENSIONS)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "%s '%s' has %llu dimensions, at most %d are served",
                             kind, name, (unsigned long long)rank, MOST_DIMENSIONS);
    for (uint64_t axis = 0; axis < rank; axis++)
        if (shape[axis] < 0)
            return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "%s '%s' has dimension %lld: expected at least 0",
                                 kind, name, (long long)shape[axis]);
    *tensor = made(name, datatype, shape, rank);
    return *tensor ? NULL : no_memory(name);
}

static TRITONSERVER_Error *set_base(struct Tensor *tensor, void *base, void **buffer, uint64_t byte_size,
                                    TRITONSERVER_MemoryType *memory_type, int64_t *memory_type_id) {
    tensor->base = *buffer = base;
    tensor->attributes.byte_size = byte_size;
    *memory_type = TRITONSERVER_MEMORY_CPU;
    *memory_type_id = 0;
    return NULL;
}

/* Gives a tensor new memory of this size. */
static TRITONSERVER_Error *allocate(struct Tensor *tensor, void **buffer, uint64_t byte_size,
                                    TRITONSERVER_MemoryType *memory_type, int64_t *memory_type_id) {
    void *base;
    free_base(tensor);
    if (posix_memalign(&base, ALIGNMENT, byte_size ? byte_size : 1) != 0)
        return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for the %llu bytes of '%s'",
                             (unsigned long long)byte_size, tensor->name);
    return set_base(tensor, base, buffer, byte_size, memory_type, memory_type_id);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* References to a request */

static void hold(TRITONBACKEND_Request *request) {
    atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
}

void inferd_drop(TRITONBACKEND_Request *request) {
    if (atomic_fetch_sub_explicit(&request->references, 1, memory_order_acq_rel) == 1)
        inferd_host.forget(request->owner);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Factories and responses */

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory **factory,
                                                     TRITONBACKEND_Request *request) {
    *factory = malloc(sizeof **factory);
    if (*factory == NULL) return no_memory("a response factory");
    (*factory)->request = request;
    hold(request);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory *factory) {
    if (factory == NULL) return NULL;
    TRITONBACKEND_Request *request = factory->request;
    free(factory);
    inferd_drop(request);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory *factory, uint32_t flags) {
    return inferd_host.send(factory->request->owner, NULL, flags, NULL);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory *factory, bool *cancelled) {
    *cancelled = inferd_host.is_cancelled(factory->request->owner);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseNew(TRITONBACKEND_Response **response, TRITONBACKEND_Request *request) {
    *response = calloc(1, sizeof **response);
    if (*response == NULL) return no_memory("a response");
    (*response)->request = request;
    (*response)->last_output = &(*response)->outputs;
    (*response)->last_parameter = &(*response)->parameters;
    hold(request);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response **response,
                                                         TRITONBACKEND_ResponseFactory *factory) {
    return TRITONBACKEND_ResponseNew(response, factory->request);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response *response) {
    if (response == NULL) return NULL;
    TRITONBACKEND_Request *request = response->request;
    inferd_free_tensors(response->outputs);
    inferd_free_parameters(response->parameters);
    free(response);
    inferd_drop(request);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseSend(TRITONBACKEND_Response *response, uint32_t flags,
                                               TRITONSERVER_Error *error) {
    TRITONSERVER_Error *failed = inferd_host.send(response->request->owner, response, flags, error);
    TRITONBACKEND_ResponseDelete(response);
    return failed;
}

static TRITONSERVER_Error *set_parameter(TRITONBACKEND_Response *response, const char *name,
                                         TRITONSERVER_ParameterType type, const void *value) {
    TRITONSERVER_Parameter *parameter = TRITONSERVER_ParameterNew(name, type, value);
    if (parameter == NULL) return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "a parameter needs a name and a value");
    *response->last_parameter = parameter;
    response->last_parameter = &parameter->next;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ResponseSetStringParameter(TRITONBACKEND_Response *response, const char *name,
                                                             const char *value) {
    return set_parameter(response, name, TRITONSERVER_PARAMETER_STRING, value);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseSetIntParameter(TRITONBACKEND_Response *response, const char *name,
                                                          int64_t value) {
    return set_parameter(response, name, TRITONSERVER_PARAMETER_INT, &value);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseSetBoolParameter(TRITONBACKEND_Response *response, const char *name,
                                                           bool value) {
    return set_parameter(response, name, TRITONSERVER_PARAMETER_BOOL, &value);
}

TRITONSERVER_Error *TRITONBACKEND_ResponseSetDoubleParameter(TRITONBACKEND_Response *response, const char *name,
                                                             double value) {
    return set_parameter(response, name, TRITONSERVER_PARAMETER_DOUBLE, &value);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Outputs */

TRITONSERVER_Error *TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response *response, TRITONBACKEND_Output **output,
                                                 const char *name, TRITONSERVER_DataType datatype,
                                                 const int64_t *shape, uint32_t rank) {
    struct Tensor *tensor;
    *output = NULL;
    if (response->output_count == MOST_OUTPUTS)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "a response has at most %d outputs", MOST_OUTPUTS);
    TRITONSERVER_Error *error = inferd_new_tensor(&tensor, "output", name, datatype, shape, rank);
    if (error) return error;
    tensor->request = response->request;
    *response->last_output = tensor;
    response->last_output = &tensor->next;
    response->output_count++;
    *output = (TRITONBACKEND_Output *)tensor;
    return NULL;
}

void inferd_open_grant(struct Grant *grant, uintptr_t at, uintptr_t end) {
    grant->end = end;
    atomic_store(&grant->at, at);
}

uintptr_t inferd_close_grant(struct Grant *grant) {
    return atomic_exchange(&grant->at, grant->end);
}

bool inferd_uses_grant(struct Grant *grant) {
    return atomic_load(&grant->tensors) != 0;
}

/* `byte_size` bytes of the grant, for one more tensor; NULL: it has no room for them. The tensor is counted before it has
 * memory: if the grant is closed and no tensor is counted, none will be in it. */
static void *take(struct Grant *grant, uint64_t byte_size) {
    uintptr_t at = atomic_load_explicit(&grant->at, memory_order_relaxed), from;
    atomic_fetch_add_explicit(&grant->tensors, 1, memory_order_acq_rel);
    do {
        from = (at + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1);
        if (from >= grant->end || byte_size > grant->end - from) {
            atomic_fetch_sub_explicit(&grant->tensors, 1, memory_order_acq_rel);
            return NULL;
        }
    } while (!atomic_compare_exchange_weak_explicit(&grant->at, &at, from + byte_size, memory_order_acq_rel,
                                                    memory_order_relaxed));
    return (void *)from;
}

TRITONSERVER_Error *TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output *output, void **buffer, uint64_t byte_size,
                                               TRITONSERVER_MemoryType *memory_type, int64_t *memory_type_id) {
    struct Tensor *tensor = &output->tensor;
    void *base = byte_size > SENT_IN_RECORD ? take(tensor->request->grant, byte_size) : NULL;
    if (base == NULL) return allocate(tensor, buffer, byte_size, memory_type, memory_type_id);
    free_base(tensor);
    tensor->granted = true;
    return set_base(tensor, base, buffer, byte_size, memory_type, memory_type_id);
}

TRITONSERVER_Error *TRITONBACKEND_OutputBufferAttributes(TRITONBACKEND_Output *output,
                                                         TRITONSERVER_BufferAttributes **attributes) {
    *attributes = &output->tensor.attributes;
    return NULL;
}

static void describe(struct Tensor *tensor, const char **name, TRITONSERVER_DataType *datatype, const int64_t **shape,
                     uint64_t *rank) {
    if (name) *name = tensor->name;
    *datatype = tensor->datatype;
    *shape = tensor->shape;
    *rank = tensor->rank;
}

TRITONSERVER_Error *TRITONBACKEND_InferenceResponseOutput(TRITONBACKEND_Response *response, uint32_t index,
                                                          const char **name, TRITONSERVER_DataType *datatype,
                                                          const int64_t **shape, uint64_t *rank) {
    if (index >= response->output_count)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: there are %u outputs", index,
                             response->output_count);
    struct Tensor *tensor = response->outputs;
    while (index--) tensor = tensor->next;
    describe(tensor, name, datatype, shape, rank);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_InferenceResponseOutputByName(TRITONBACKEND_Response *response, const char *name,
                                                                TRITONSERVER_DataType *datatype,
                                                                const int64_t **shape, uint64_t *rank) {
    for (struct Tensor *tensor = response->outputs; tensor; tensor = tensor->next)
        if (strcmp(tensor->name, name) == 0) {
            describe(tensor, NULL, datatype, shape, rank);
            return NULL;
        }
    return inferd_refuse(TRITONSERVER_ERROR_NOT_FOUND, "the response has no output '%s'", name);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* States. An updated state goes with the next response, also if that waits for the end of the batch; or with the request,
 * if that is rescheduled. */

/* The place of a state among those of the model; -1: it has none of this name. */
static int place_of(const TRITONBACKEND_Request *request, const char *name) {
    for (int at = 0; request->state_names[at]; at++)
        if (strcmp(request->state_names[at], name) == 0) return at;
    return -1;
}

bool inferd_resize(struct Shared *shared, size_t size) {
    void *grown;
    if (shared->base && shared->size == size) return true;
    if (posix_memalign(&grown, ALIGNMENT, size ? size : 1) != 0) return false;
    if (shared->base) memcpy(grown, shared->base, size < shared->size ? size : shared->size);
    if (shared->before)
        free(shared->base);
    else
        shared->before = shared->base;
    shared->base = grown;
    shared->size = size;
    return true;
}

TRITONSERVER_Error *TRITONBACKEND_StateNew(TRITONBACKEND_State **state, TRITONBACKEND_Request *request,
                                           const char *name, TRITONSERVER_DataType datatype, const int64_t *shape,
                                           uint32_t rank) {
    struct Tensor *tensor;
    *state = NULL;
    if (*request->state_names == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "unable to add state '%s'. State configuration is missing for model '%s'.",
                             name ? name : "", request->model);
    if (name == NULL || place_of(request, name) < 0)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "state '%s' is not a valid state name: expected an output_name of sequence_batching.state",
                             name ? name : "");
    TRITONSERVER_Error *error = inferd_new_tensor(&tensor, "state", name, datatype, shape, rank);
    if (error) return error;
    tensor->request = request;
    tensor->next = request->states;
    request->states = tensor;
    *state = (TRITONBACKEND_State *)tensor;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_StateUpdate(TRITONBACKEND_State *state) {
    if (state->tensor.request->sent)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "state '%s' is updated after the last response of its request has gone: expected before",
                             state->tensor.name);
    state->tensor.updated = true;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_StateBuffer(TRITONBACKEND_State *state, void **buffer, uint64_t byte_size,
                                              TRITONSERVER_MemoryType *memory_type, int64_t *memory_type_id) {
    struct Tensor *tensor = &state->tensor;
    struct Shared *shared = tensor->request->shared[place_of(tensor->request, tensor->name)];
    if (shared == NULL) return allocate(tensor, buffer, byte_size, memory_type, memory_type_id);
    if (!inferd_resize(shared, byte_size)) return no_memory(tensor->name);
    tensor->shared = true;
    tensor->updated = true; /* the memory is that of the state, so what is written there counts at once */
    return set_base(tensor, shared->base, buffer, byte_size, memory_type, memory_type_id);
}

TRITONSERVER_Error *TRITONBACKEND_StateBufferAttributes(TRITONBACKEND_State *state,
                                                        TRITONSERVER_BufferAttributes **attributes) {
    *attributes = &state->tensor.attributes;
    return NULL;
}
