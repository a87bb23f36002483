/* Requests of the backend to other models, and questions to the server. The backend owns a request, except from
 * TRITONSERVER_ServerInferAsync until the host calls its release callback. */

#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <string.h>

#include "objects.h"

static TRITONSERVER_Error *no_memory(const char *what) {
    return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for %s", what);
}

/* Replaces a text by a copy of another one; NULL is an empty text. */
static TRITONSERVER_Error *set_text(char **place, const char *text) {
    char *copy = strdup(text ? text : "");
    if (copy == NULL) return no_memory("a text");
    free(*place);
    *place = copy;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Making and deleting requests */

TRITONSERVER_Error *TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest **request,
                                                     TRITONSERVER_Server *server, const char *model,
                                                     int64_t version) {
    (void)server;
    *request = NULL;
    if (model == NULL || *model == 0)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "a request names no model: expected a model's name");
    TRITONSERVER_InferenceRequest *made = calloc(1, sizeof *made);
    if (made == NULL) return no_memory("a request");
    made->model = strdup(model);
    made->id = strdup("");
    made->version = version;
    *request = made;
    if (made->model && made->id) return NULL;
    TRITONSERVER_InferenceRequestDelete(made);
    *request = NULL;
    return no_memory("a request");
}

static TRITONSERVER_Error *check_idle(TRITONSERVER_InferenceRequest *request) {
    if (request->call == NULL) return NULL;
    return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                         "the request to model '%s' is under way: expected after its release callback",
                         request->model);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest *request) {
    if (request == NULL) return NULL;
    TRITONSERVER_Error *error = check_idle(request);
    if (error) return error;
    TRITONSERVER_InferenceRequestRemoveAllInputs(request);
    TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(request);
    inferd_free_parameters(request->parameters);
    free(request->model);
    free(request->id);
    free(request->correlation_text);
    free(request);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Properties of a request */

#define FIELD(name, set_name, type, field)                                                                        \
    TRITONSERVER_Error *TRITONSERVER_InferenceRequest##name(TRITONSERVER_InferenceRequest *request, type *value) { \
        *value = (type)request->field;                                                                            \
        return NULL;                                                                                              \
    }                                                                                                             \
    TRITONSERVER_Error *TRITONSERVER_InferenceRequest##set_name(TRITONSERVER_InferenceRequest *request, type value) { \
        request->field = value;                                                                                   \
        return NULL;                                                                                              \
    }

FIELD(Flags, SetFlags, uint32_t, flags)
FIELD(Priority, SetPriority, uint32_t, priority)
FIELD(PriorityUInt64, SetPriorityUInt64, uint64_t, priority)
FIELD(TimeoutMicroseconds, SetTimeoutMicroseconds, uint64_t, timeout)

TRITONSERVER_Error *TRITONSERVER_InferenceRequestId(TRITONSERVER_InferenceRequest *request, const char **id) {
    *id = request->id;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetId(TRITONSERVER_InferenceRequest *request, const char *id) {
    return set_text(&request->id, id);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestCorrelationId(TRITONSERVER_InferenceRequest *request, uint64_t *id) {
    if (request->correlation_text)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the correlation id is a text: '%s'",
                             request->correlation_text);
    *id = request->correlation_id;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestCorrelationIdString(TRITONSERVER_InferenceRequest *request,
                                                                     const char **id) {
    if (request->correlation_text == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the correlation id is a number: %llu",
                             (unsigned long long)request->correlation_id);
    *id = request->correlation_text;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetCorrelationId(TRITONSERVER_InferenceRequest *request,
                                                                  uint64_t id) {
    free(request->correlation_text);
    request->correlation_text = NULL;
    request->correlation_id = id;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetCorrelationIdString(TRITONSERVER_InferenceRequest *request,
                                                                        const char *id) {
    return set_text(&request->correlation_text, id);
}

/* Replaces a parameter of the same name. */
static TRITONSERVER_Error *set_parameter(TRITONSERVER_InferenceRequest *request, const char *name,
                                         TRITONSERVER_ParameterType type, const void *value) {
    TRITONSERVER_Parameter *parameter = TRITONSERVER_ParameterNew(name, type, value);
    if (parameter == NULL) return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "a parameter needs a name and a value");
    TRITONSERVER_Parameter **link = &request->parameters;
    while (*link && strcmp((*link)->name, name) != 0) link = &(*link)->next;
    TRITONSERVER_Parameter *before = *link;
    parameter->next = before ? before->next : NULL;
    *link = parameter;
    TRITONSERVER_ParameterDelete(before);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetStringParameter(TRITONSERVER_InferenceRequest *request,
                                                                    const char *name, const char *value) {
    return set_parameter(request, name, TRITONSERVER_PARAMETER_STRING, value);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetIntParameter(TRITONSERVER_InferenceRequest *request,
                                                                 const char *name, int64_t value) {
    return set_parameter(request, name, TRITONSERVER_PARAMETER_INT, &value);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetBoolParameter(TRITONSERVER_InferenceRequest *request,
                                                                  const char *name, bool value) {
    return set_parameter(request, name, TRITONSERVER_PARAMETER_BOOL, &value);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetDoubleParameter(TRITONSERVER_InferenceRequest *request,
                                                                    const char *name, double value) {
    return set_parameter(request, name, TRITONSERVER_PARAMETER_DOUBLE, &value);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Inputs. Their data belongs to the caller. */

/* The link to the input of this name, or the link at the end of the list. */
static struct CallInput **input_link(TRITONSERVER_InferenceRequest *request, const char *name) {
    struct CallInput **link = &request->inputs;
    while (*link && strcmp((*link)->tensor->name, name) != 0) link = &(*link)->next;
    return link;
}

static TRITONSERVER_Error *find_input(TRITONSERVER_InferenceRequest *request, const char *name,
                                      struct CallInput **input) {
    *input = *input_link(request, name);
    if (*input) return NULL;
    return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the request to model '%s' has no input '%s'", request->model,
                         name);
}

static void remove_input(struct CallInput **link) {
    struct CallInput *input = *link;
    *link = input->next;
    inferd_free_tensors(input->tensor);
    free(input->pieces);
    free(input);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest *request, const char *name,
                                                          TRITONSERVER_DataType datatype, const int64_t *shape,
                                                          uint64_t rank) {
    struct Tensor *tensor;
    TRITONSERVER_Error *error = inferd_new_tensor(&tensor, "input", name, datatype, shape, rank);
    if (error) return error;
    struct CallInput **link = input_link(request, name);
    if (*link) {
        inferd_free_tensors(tensor);
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the request to model '%s' has an input '%s' already",
                             request->model, name);
    }
    *link = calloc(1, sizeof **link);
    if (*link == NULL) {
        inferd_free_tensors(tensor);
        return no_memory("an input");
    }
    (*link)->tensor = tensor;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestRemoveInput(TRITONSERVER_InferenceRequest *request,
                                                             const char *name) {
    struct CallInput *input;
    TRITONSERVER_Error *error = find_input(request, name, &input);
    if (error == NULL) remove_input(input_link(request, name));
    return error;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestRemoveAllInputs(TRITONSERVER_InferenceRequest *request) {
    while (request->inputs) remove_input(&request->inputs);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestAppendInputData(TRITONSERVER_InferenceRequest *request,
                                                                 const char *name, const void *base, size_t byte_size,
                                                                 TRITONSERVER_MemoryType memory_type,
                                                                 int64_t memory_type_id) {
    (void)memory_type_id;
    struct CallInput *input;
    TRITONSERVER_Error *error = find_input(request, name, &input);
    if (error) return error;
    if (memory_type == TRITONSERVER_MEMORY_GPU)
        return inferd_refuse(TRITONSERVER_ERROR_UNSUPPORTED,
                             "input '%s' of a request to another model lies on a GPU: expected memory of the CPU",
                             name);
    struct Piece *pieces = realloc(input->pieces, (input->piece_count + 1) * sizeof *pieces);
    if (pieces == NULL) return no_memory("an input");
    pieces[input->piece_count++] = (struct Piece){base, byte_size};
    input->pieces = pieces;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(
    TRITONSERVER_InferenceRequest *request, const char *name, const void *base, size_t byte_size,
    TRITONSERVER_MemoryType memory_type, int64_t memory_type_id, const char *policy) {
    (void)policy;
    return TRITONSERVER_InferenceRequestAppendInputData(request, name, base, byte_size, memory_type, memory_type_id);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(
    TRITONSERVER_InferenceRequest *request, const char *name, const void *base,
    TRITONSERVER_BufferAttributes *attributes) {
    return TRITONSERVER_InferenceRequestAppendInputData(request, name, base, attributes->byte_size,
                                                        attributes->memory_type, attributes->memory_type_id);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestRemoveAllInputData(TRITONSERVER_InferenceRequest *request,
                                                                    const char *name) {
    struct CallInput *input;
    TRITONSERVER_Error *error = find_input(request, name, &input);
    if (error == NULL) input->piece_count = 0;
    return error;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Requested outputs */

/* The link to the output of this name, or the link at the end of the list. */
static struct Name **output_link(TRITONSERVER_InferenceRequest *request, const char *name) {
    struct Name **link = &request->outputs;
    while (*link && strcmp((*link)->text, name) != 0) link = &(*link)->next;
    return link;
}

static void remove_output(struct Name **link) {
    struct Name *output = *link;
    *link = output->next;
    free(output);
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest *request,
                                                                    const char *name) {
    struct Name **link = output_link(request, name);
    if (*link) return NULL;
    *link = calloc(1, sizeof **link + strlen(name) + 1);
    if (*link == NULL) return no_memory("the name of an output");
    strcpy((*link)->text, name);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestRemoveRequestedOutput(TRITONSERVER_InferenceRequest *request,
                                                                       const char *name) {
    struct Name **link = output_link(request, name);
    if (*link) remove_output(link);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(TRITONSERVER_InferenceRequest *request) {
    while (request->outputs) remove_output(&request->outputs);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Sending a request */

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetReleaseCallback(TRITONSERVER_InferenceRequest *request,
                                                                    ReleaseFunction release, void *data) {
    request->release = release;
    request->release_data = data;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestSetResponseCallback(TRITONSERVER_InferenceRequest *request,
                                                                     TRITONSERVER_ResponseAllocator *allocator,
                                                                     void *allocator_data, ResponseFunction respond,
                                                                     void *data) {
    request->allocator = allocator;
    request->allocator_data = allocator_data;
    request->respond = respond;
    request->respond_data = data;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest *request) {
    request->cancelled = true;
    inferd_host.cancel(request);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceRequestIsCancelled(TRITONSERVER_InferenceRequest *request, bool *cancelled) {
    *cancelled = request->cancelled;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ServerInferAsync(TRITONSERVER_Server *server, TRITONSERVER_InferenceRequest *request,
                                                  TRITONSERVER_InferenceTrace *trace) {
    (void)server, (void)trace;
    TRITONSERVER_Error *error = check_idle(request);
    if (error) return error;
    if (request->release == NULL || request->respond == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "the request to model '%s' lacks its release callback or its response callback",
                             request->model);
    if (request->allocator == NULL || request->allocator->allocate == NULL || request->allocator->release == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "the request to model '%s' has an allocator without a function to allocate or to release",
                             request->model);
    request->cancelled = false;
    return inferd_host.call(request);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* The state of the server */

TRITONSERVER_Error *TRITONSERVER_ServerIsLive(TRITONSERVER_Server *server, bool *live) {
    (void)server;
    *live = true; /* this process ends with that of the server */
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server *server, const char *model, int64_t version,
                                                    bool *ready) {
    (void)server;
    return inferd_host.is_ready(model, version, ready);
}

TRITONSERVER_Error *TRITONSERVER_ServerModelTransactionProperties(TRITONSERVER_Server *server, const char *model,
                                                                  int64_t version, uint32_t *flags, void **reserved) {
    (void)server, (void)reserved;
    bool decoupled;
    TRITONSERVER_Error *error = inferd_host.is_decoupled(model, version, &decoupled);
    if (error == NULL) *flags = decoupled ? TRITONSERVER_TXN_DECOUPLED : TRITONSERVER_TXN_ONE_TO_ONE;
    return error;
}

TRITONSERVER_Error *TRITONSERVER_ServerLoadModelWithParameters(TRITONSERVER_Server *server, const char *model,
                                                               const TRITONSERVER_Parameter **parameters,
                                                               uint64_t count) {
    (void)server;
    return inferd_host.load_model(model, parameters, count);
}

TRITONSERVER_Error *TRITONSERVER_ServerLoadModel(TRITONSERVER_Server *server, const char *model) {
    return TRITONSERVER_ServerLoadModelWithParameters(server, model, NULL, 0);
}

TRITONSERVER_Error *TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server *server, const char *model) {
    (void)server;
    return inferd_host.unload_model(model, false);
}

TRITONSERVER_Error *TRITONSERVER_ServerUnloadModelAndDependents(TRITONSERVER_Server *server, const char *model) {
    (void)server;
    return inferd_host.unload_model(model, true);
}
