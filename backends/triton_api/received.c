/* Responses of other models to requests of the backend. The host makes a response in memory from the backend's
 * allocator. The backend gets it, and deletes it. */

#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <string.h>

#include "objects.h"

static TRITONSERVER_Error *no_memory(void) {
    return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for a response");
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Allocators. They are not asked about their memory, because all of it is the CPU's. */

TRITONSERVER_Error *TRITONSERVER_ResponseAllocatorNew(TRITONSERVER_ResponseAllocator **allocator,
                                                      AllocateFunction allocate, FreeFunction release,
                                                      StartFunction start) {
    *allocator = calloc(1, sizeof **allocator);
    if (*allocator == NULL) return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for an allocator");
    (*allocator)->allocate = allocate;
    (*allocator)->release = release;
    (*allocator)->start = start;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(
    TRITONSERVER_ResponseAllocator *allocator, void (*describe)(void)) {
    (void)allocator, (void)describe;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ResponseAllocatorSetQueryFunction(TRITONSERVER_ResponseAllocator *allocator,
                                                                   void (*query)(void)) {
    (void)allocator, (void)query;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_ResponseAllocatorDelete(TRITONSERVER_ResponseAllocator *allocator) {
    free(allocator);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Making responses, for the host */

TRITONSERVER_InferenceResponse *inferd_new_response(const TRITONSERVER_InferenceRequest *request) {
    TRITONSERVER_InferenceResponse *made = calloc(1, sizeof *made);
    if (made == NULL) abort(); /* NULL would mean that there is no response */
    made->allocator = request->allocator;
    made->allocator_data = request->allocator_data;
    made->version = request->version;
    made->model = strdup(request->model);
    made->id = strdup(request->id);
    if (made->model == NULL || made->id == NULL) abort();
    made->last_parameter = &made->parameters;
    return made;
}

TRITONSERVER_Error *inferd_start_response(TRITONSERVER_InferenceResponse *response) {
    StartFunction start = response->allocator->start;
    return start ? start(response->allocator, response->allocator_data) : NULL;
}

static TRITONSERVER_Error *take_memory(TRITONSERVER_InferenceResponse *response, struct ReceivedOutput *output) {
    struct TRITONSERVER_BufferAttributes *attributes = &output->tensor->attributes;
    attributes->memory_type = TRITONSERVER_MEMORY_CPU;
    attributes->memory_type_id = 0;
    TRITONSERVER_Error *error = response->allocator->allocate(
        response->allocator, output->tensor->name, attributes->byte_size, TRITONSERVER_MEMORY_CPU, 0,
        response->allocator_data, &output->buffer, &output->buffer_data, &attributes->memory_type,
        &attributes->memory_type_id);
    if (error) return error;
    if (attributes->memory_type == TRITONSERVER_MEMORY_GPU)
        return inferd_refuse(TRITONSERVER_ERROR_UNSUPPORTED,
                             "the allocator gave memory of a GPU for output '%s': expected memory of the CPU",
                             output->tensor->name);
    if (output->buffer == NULL && attributes->byte_size)
        return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "the allocator gave no memory for the %zu bytes of '%s'",
                             attributes->byte_size, output->tensor->name);
    return NULL;
}

TRITONSERVER_Error *inferd_add_output(TRITONSERVER_InferenceResponse *response, const char *name,
                                        TRITONSERVER_DataType datatype, const int64_t *shape, uint32_t rank,
                                        const void *data, size_t size) {
    struct ReceivedOutput *outputs = realloc(response->outputs, (response->output_count + 1) * sizeof *outputs);
    if (outputs == NULL) return no_memory();
    response->outputs = outputs;
    struct ReceivedOutput *output = &outputs[response->output_count];
    *output = (struct ReceivedOutput){NULL, NULL, NULL};
    TRITONSERVER_Error *error = inferd_new_tensor(&output->tensor, "output", name, datatype, shape, rank);
    if (error) return error;
    response->output_count++;
    output->tensor->attributes.byte_size = size;
    error = take_memory(response, output);
    if (error == NULL && size) memcpy(output->buffer, data, size);
    return error;
}

TRITONSERVER_Error *inferd_add_parameter(TRITONSERVER_InferenceResponse *response, const char *name,
                                         TRITONSERVER_ParameterType type, const void *value) {
    TRITONSERVER_Parameter *parameter = TRITONSERVER_ParameterNew(name, type, value);
    if (parameter == NULL) return no_memory();
    *response->last_parameter = parameter;
    response->last_parameter = &parameter->next;
    response->parameter_count++;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Reading responses, for the backend */

TRITONSERVER_Error *TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse *response) {
    if (response == NULL) return NULL;
    for (uint32_t index = 0; index < response->output_count; index++) {
        struct ReceivedOutput *output = &response->outputs[index];
        struct TRITONSERVER_BufferAttributes *attributes = &output->tensor->attributes;
        if (output->buffer)
            TRITONSERVER_ErrorDelete(response->allocator->release(response->allocator, output->buffer,
                                                                  output->buffer_data, attributes->byte_size,
                                                                  attributes->memory_type, attributes->memory_type_id));
        inferd_free_tensors(output->tensor);
    }
    inferd_free_parameters(response->parameters);
    TRITONSERVER_ErrorDelete(response->error);
    free(response->outputs);
    free(response->model);
    free(response->id);
    free(response);
    return NULL;
}

/* The error stays the response's, which deletes it. */
TRITONSERVER_Error *TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse *response) {
    return response->error;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseModel(TRITONSERVER_InferenceResponse *response, const char **model,
                                                        int64_t *version) {
    *model = response->model;
    *version = response->version;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseId(TRITONSERVER_InferenceResponse *response, const char **id) {
    *id = response->id;
    return NULL;
}

static TRITONSERVER_Error *check_index(const char *what, uint32_t index, uint32_t count) {
    if (index < count) return NULL;
    return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "out of bounds index %u: there are %u %s", index, count, what);
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse *response,
                                                                 uint32_t *count) {
    *count = response->parameter_count;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseParameter(TRITONSERVER_InferenceResponse *response, uint32_t index,
                                                            const char **name, TRITONSERVER_ParameterType *type,
                                                            const void **value) {
    TRITONSERVER_Error *error = check_index("parameters", index, response->parameter_count);
    if (error) return error;
    TRITONSERVER_Parameter *parameter = response->parameters;
    while (index--) parameter = parameter->next;
    *name = parameter->name;
    *type = parameter->type;
    *value = parameter->text ? parameter->text : (const void *)&parameter->plain;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseOutputCount(TRITONSERVER_InferenceResponse *response,
                                                              uint32_t *count) {
    *count = response->output_count;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseOutput(TRITONSERVER_InferenceResponse *response, uint32_t index,
                                                         const char **name, TRITONSERVER_DataType *datatype,
                                                         const int64_t **shape, uint64_t *rank, const void **base,
                                                         size_t *byte_size, TRITONSERVER_MemoryType *memory_type,
                                                         int64_t *memory_type_id, void **buffer_data) {
    TRITONSERVER_Error *error = check_index("outputs", index, response->output_count);
    if (error) return error;
    struct ReceivedOutput *output = &response->outputs[index];
    *name = output->tensor->name;
    *datatype = output->tensor->datatype;
    *shape = output->tensor->shape;
    *rank = output->tensor->rank;
    *base = output->buffer;
    *byte_size = output->tensor->attributes.byte_size;
    *memory_type = output->tensor->attributes.memory_type;
    *memory_type_id = output->tensor->attributes.memory_type_id;
    *buffer_data = output->buffer_data;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_InferenceResponseOutputClassificationLabel(TRITONSERVER_InferenceResponse *response,
                                                                            uint32_t index, size_t class_index,
                                                                            const char **label) {
    (void)class_index;
    *label = NULL; /* requests for classes are not supported */
    return check_index("outputs", index, response->output_count);
}
