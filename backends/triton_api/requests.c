/* Requests and their inputs. The host has set the structures; these functions do not change them. */

#include <string.h>

#include "objects.h"

/* ------------------------------------------------------------------------------------------------------------------ */
/* Inputs. Each lies in one buffer of the host's memory, for every host policy. */

TRITONSERVER_Error *TRITONBACKEND_InputProperties(TRITONBACKEND_Input *input, const char **name,
                                                  TRITONSERVER_DataType *datatype, const int64_t **shape,
                                                  uint32_t *rank, uint64_t *byte_size, uint32_t *buffers) {
    struct Tensor *tensor = &input->tensor;
    if (name) *name = tensor->name;
    if (datatype) *datatype = tensor->datatype;
    if (shape) *shape = tensor->shape;
    if (rank) *rank = tensor->rank;
    if (byte_size) *byte_size = tensor->attributes.byte_size;
    if (buffers) *buffers = 1;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_InputPropertiesForHostPolicy(TRITONBACKEND_Input *input, const char *policy,
                                                               const char **name, TRITONSERVER_DataType *datatype,
                                                               const int64_t **shape, uint32_t *rank,
                                                               uint64_t *byte_size, uint32_t *buffers) {
    (void)policy;
    return TRITONBACKEND_InputProperties(input, name, datatype, shape, rank, byte_size, buffers);
}

static TRITONSERVER_Error *check_index(const char *what, uint32_t index, uint32_t count) {
    if (index < count) return NULL;
    return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: there are %u %s", index, count, what);
}

TRITONSERVER_Error *TRITONBACKEND_InputBuffer(TRITONBACKEND_Input *input, uint32_t index, const void **buffer,
                                              uint64_t *byte_size, TRITONSERVER_MemoryType *memory_type,
                                              int64_t *memory_type_id) {
    TRITONSERVER_Error *error = check_index("buffers", index, 1);
    if (error) return error;
    *buffer = input->tensor.base;
    *byte_size = input->tensor.attributes.byte_size;
    *memory_type = TRITONSERVER_MEMORY_CPU;
    *memory_type_id = 0;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_InputBufferForHostPolicy(TRITONBACKEND_Input *input, const char *policy,
                                                           uint32_t index, const void **buffer, uint64_t *byte_size,
                                                           TRITONSERVER_MemoryType *memory_type,
                                                           int64_t *memory_type_id) {
    (void)policy;
    return TRITONBACKEND_InputBuffer(input, index, buffer, byte_size, memory_type, memory_type_id);
}

TRITONSERVER_Error *TRITONBACKEND_InputBufferAttributes(TRITONBACKEND_Input *input, uint32_t index,
                                                        const void **buffer,
                                                        TRITONSERVER_BufferAttributes **attributes) {
    TRITONSERVER_Error *error = check_index("buffers", index, 1);
    if (error) return error;
    *buffer = input->tensor.base;
    *attributes = &input->tensor.attributes;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Requests */

#define GETTER(function, type, expression)                                      \
    TRITONSERVER_Error *function(TRITONBACKEND_Request *request, type *value) { \
        *value = expression;                                                    \
        return NULL;                                                            \
    }

GETTER(TRITONBACKEND_RequestId, const char *, request->id)
GETTER(TRITONBACKEND_RequestFlags, uint32_t, request->flags)
GETTER(TRITONBACKEND_InferenceRequestTimeoutMicroseconds, uint64_t, request->timeout)
GETTER(TRITONBACKEND_RequestIsCancelled, bool, inferd_host.is_cancelled(request->owner))
GETTER(TRITONBACKEND_RequestParameterCount, uint32_t, request->parameter_count)
GETTER(TRITONBACKEND_RequestInputCount, uint32_t, request->input_count)
GETTER(TRITONBACKEND_RequestOutputCount, uint32_t, request->output_count)

TRITONSERVER_Error *TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request *request, uint64_t *id) {
    if (request->correlation_text)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the correlation id is a text: '%s'",
                             request->correlation_text);
    *id = request->correlation_id;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestCorrelationIdString(TRITONBACKEND_Request *request, const char **id) {
    if (request->correlation_text == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the correlation id is a number: %llu",
                             (unsigned long long)request->correlation_id);
    *id = request->correlation_text;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestParameter(TRITONBACKEND_Request *request, uint32_t index, const char **key,
                                                   TRITONSERVER_ParameterType *type, const void **value) {
    TRITONSERVER_Error *error = check_index("parameters", index, request->parameter_count);
    if (error) return error;
    TRITONSERVER_Parameter *parameter = &request->parameters[index];
    *key = parameter->name;
    *type = parameter->type;
    *value = parameter->text ? parameter->text : (const void *)&parameter->plain;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestInputName(TRITONBACKEND_Request *request, uint32_t index, const char **name) {
    *name = NULL;
    TRITONSERVER_Error *error = check_index("inputs", index, request->input_count);
    if (error) return error;
    *name = request->inputs[index].tensor.name;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestInput(TRITONBACKEND_Request *request, const char *name,
                                               TRITONBACKEND_Input **input) {
    for (uint32_t index = 0; index < request->input_count; index++)
        if (strcmp(request->inputs[index].tensor.name, name) == 0) {
            *input = &request->inputs[index];
            return NULL;
        }
    *input = NULL;
    return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the request has no input '%s'", name);
}

TRITONSERVER_Error *TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request *request, uint32_t index,
                                                      TRITONBACKEND_Input **input) {
    *input = NULL;
    TRITONSERVER_Error *error = check_index("inputs", index, request->input_count);
    if (error) return error;
    *input = &request->inputs[index];
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request *request, uint32_t index,
                                                    const char **name) {
    *name = NULL;
    TRITONSERVER_Error *error = check_index("outputs", index, request->output_count);
    if (error) return error;
    *name = request->outputs[index];
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestOutputBufferProperties(TRITONBACKEND_Request *request, const char *name,
                                                                size_t *byte_size,
                                                                TRITONSERVER_MemoryType *memory_type,
                                                                int64_t *memory_type_id) {
    (void)request, (void)name, (void)byte_size; /* all outputs lie in memory of the CPU, whatever their size */
    *memory_type = TRITONSERVER_MEMORY_CPU;
    *memory_type_id = 0;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestTrace(TRITONBACKEND_Request *request, TRITONSERVER_InferenceTrace **trace) {
    (void)request;
    *trace = NULL;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_RequestRelease(TRITONBACKEND_Request *request, uint32_t flags) {
    if (flags != TRITONSERVER_REQUEST_RELEASE_ALL && flags != TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "request release flags %u: expected 1 or 2", flags);
    if (flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE && !request->reschedulable)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG,
                             "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
                             "configured to handle such a flag.");
    if (atomic_exchange(&request->released, true))
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "the request has been released already");
    inferd_host.released(request->owner, flags);
    inferd_drop(request);
    return NULL;
}
