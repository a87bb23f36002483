/* A backend for Triton's C API, the same file for Triton and for inferd: OUTPUT0 is INPUT0.
 *
 * It computes before it answers where the model's parameter "steps" says so: so many dependent multiplications for each
 * execution, whatever the size of the batch, as a model does whose time its weights take. In a decoupled model a
 * request has as many responses as the parameter "responses" says. */

#include <stdlib.h>
#include <string.h>

#include "backends/triton_api/api.h"

#define TRY(call)                           \
    do {                                    \
        TRITONSERVER_Error *failed_ = call; \
        if (failed_) return failed_;        \
    } while (0)

typedef struct {
    uint64_t steps, responses;
} Model;

/* The number in "key": {"string_value": "123"} of a configuration; 0 without one. */
static uint64_t parameter(const char *config, const char *key) {
    const char *found = strstr(config, key);
    found = found ? strstr(found, "string_value\":\"") : NULL;
    return found ? strtoull(found + strlen("string_value\":\""), NULL, 10) : 0;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *self) {
    TRITONSERVER_Message *config;
    const char *text;
    size_t size;
    TRY(TRITONBACKEND_ModelConfig(self, 1, &config));
    TRY(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
    Model *model = calloc(1, sizeof(Model));
    if (model == NULL) abort();
    model->steps = parameter(text, "\"steps\"");
    model->responses = parameter(text, "\"responses\"");
    TRITONSERVER_MessageDelete(config);
    return TRITONBACKEND_ModelSetState(self, model);
}

TRITONSERVER_Error *TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model *self) {
    void *model;
    TRY(TRITONBACKEND_ModelState(self, &model));
    free(model);
    return NULL;
}

static void compute(uint64_t steps) {
    volatile uint64_t result;
    uint64_t value = 1;
    for (uint64_t step = 0; step < steps; step++) value = value * 6364136223846793005u + 1442695040888963407u;
    result = value;
    (void)result;
}

static TRITONSERVER_Error *copy(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response) {
    TRITONBACKEND_Input *input;
    TRITONBACKEND_Output *output;
    TRITONSERVER_DataType datatype;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    const int64_t *shape;
    const void *from;
    void *to;
    uint64_t size;
    uint32_t rank, buffers;
    int64_t id = 0;
    TRY(TRITONBACKEND_RequestInput(request, "INPUT0", &input));
    TRY(TRITONBACKEND_InputProperties(input, NULL, &datatype, &shape, &rank, &size, &buffers));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "OUTPUT0", datatype, shape, rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &to, size, &memory, &id));
    for (uint32_t at = 0; at < buffers; at++) {
        TRY(TRITONBACKEND_InputBuffer(input, at, &from, &size, &memory, &id));
        memcpy(to, from, size);
        to = (char *)to + size;
    }
    return NULL;
}

static TRITONSERVER_Error *answer(TRITONBACKEND_Request *request, const Model *model) {
    TRITONBACKEND_ResponseFactory *factory;
    TRITONBACKEND_Response *response;
    if (model->responses == 0) {
        TRY(TRITONBACKEND_ResponseNew(&response, request));
        return TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, copy(request, response));
    }
    TRY(TRITONBACKEND_ResponseFactoryNew(&factory, request));
    for (uint64_t at = 1; at <= model->responses; at++) {
        TRY(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
        TRY(TRITONBACKEND_ResponseSend(response, at == model->responses ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0,
                                       copy(request, response)));
    }
    return TRITONBACKEND_ResponseFactoryDelete(factory);
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *instance,
                                                       TRITONBACKEND_Request **requests, uint32_t count) {
    TRITONBACKEND_Model *owner;
    void *model;
    TRY(TRITONBACKEND_ModelInstanceModel(instance, &owner));
    TRY(TRITONBACKEND_ModelState(owner, &model));
    compute(((Model *)model)->steps);
    for (uint32_t at = 0; at < count; at++) {
        TRITONSERVER_Error *failed = answer(requests[at], model);
        if (failed) {
            TRITONSERVER_LogMessage(TRITONSERVER_LOG_ERROR, __FILE__, __LINE__, TRITONSERVER_ErrorMessage(failed));
            TRITONSERVER_ErrorDelete(failed);
        }
        failed = TRITONBACKEND_RequestRelease(requests[at], TRITONSERVER_REQUEST_RELEASE_ALL);
        if (failed) TRITONSERVER_ErrorDelete(failed);
    }
    return NULL;
}
