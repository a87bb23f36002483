/* A backend for Triton's C API that asks another model: the one that the request's parameter "model" names, with the
 * request's own input. See test_triton_calls.py. */

#define _GNU_SOURCE

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/triton_api/api.h"

enum { MOST_VALUES = 4096 };

#define TRY(call)                           \
    do {                                    \
        TRITONSERVER_Error *failed_ = call; \
        if (failed_) return failed_;        \
    } while (0)

static TRITONSERVER_ResponseAllocator *allocator;
static int buffers; /* that the allocator has given, and not got back */

/* What is said of a call. */
struct Asked {
    sem_t released;
    int32_t values[MOST_VALUES];
    int64_t value_count;
    int responses;
    TRITONSERVER_Error *failed;
};

static TRITONSERVER_Error *allocate(TRITONSERVER_ResponseAllocator *from, const char *output, size_t byte_size,
                                    TRITONSERVER_MemoryType preferred_type, int64_t preferred_id, void *data,
                                    void **buffer, void **buffer_data, TRITONSERVER_MemoryType *type, int64_t *id) {
    (void)preferred_id;
    if (from != allocator || data != &buffers || preferred_type != TRITONSERVER_MEMORY_CPU) abort();
    if (byte_size == 4 * 7) /* seven numbers */
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "the caller has no memory for seven");
    *buffer = malloc(byte_size ? byte_size : 1);
    *buffer_data = strdup(output);
    *type = TRITONSERVER_MEMORY_CPU;
    *id = 0;
    __sync_fetch_and_add(&buffers, 1);
    return NULL;
}

static TRITONSERVER_Error *give_back(TRITONSERVER_ResponseAllocator *to, void *buffer, void *buffer_data,
                                     size_t byte_size, TRITONSERVER_MemoryType type, int64_t id) {
    (void)byte_size;
    if (to != allocator || type != TRITONSERVER_MEMORY_CPU || id != 0) abort();
    free(buffer);
    free(buffer_data);
    __sync_fetch_and_sub(&buffers, 1);
    return NULL;
}

static void take(struct Asked *asked, TRITONSERVER_InferenceResponse *response) {
    const char *name, *model;
    TRITONSERVER_DataType datatype;
    const int64_t *shape;
    uint64_t rank;
    const void *base;
    size_t size;
    TRITONSERVER_MemoryType type;
    int64_t id, version;
    void *data;
    uint32_t outputs;
    TRITONSERVER_Error *failed = TRITONSERVER_InferenceResponseError(response);
    if (failed) { /* the response's */
        TRITONSERVER_ErrorDelete(asked->failed);
        asked->failed = TRITONSERVER_ErrorNew(TRITONSERVER_ErrorCode(failed), TRITONSERVER_ErrorMessage(failed));
        return;
    }
    if (TRITONSERVER_InferenceResponseModel(response, &model, &version) || *model == 0) abort();
    if (TRITONSERVER_InferenceResponseOutputCount(response, &outputs) || outputs != 1) abort();
    if (TRITONSERVER_InferenceResponseOutput(response, 0, &name, &datatype, &shape, &rank, &base, &size, &type, &id,
                                             &data))
        abort();
    if (strcmp(name, "y") || strcmp(data, "y") || datatype != TRITONSERVER_TYPE_INT32 || rank != 2) abort();
    if (asked->value_count + size / 4 > MOST_VALUES) abort();
    memcpy(asked->values + asked->value_count, base, size);
    asked->value_count += size / 4;
}

static void respond(TRITONSERVER_InferenceResponse *response, uint32_t flags, void *data) {
    struct Asked *asked = data;
    if (response == NULL && flags != TRITONSERVER_RESPONSE_COMPLETE_FINAL) abort();
    if (response == NULL) return;
    asked->responses++;
    take(asked, response);
    if (TRITONSERVER_InferenceResponseDelete(response)) abort();
}

static void release(TRITONSERVER_InferenceRequest *request, uint32_t flags, void *data) {
    struct Asked *asked = data;
    if (flags != TRITONSERVER_REQUEST_RELEASE_ALL || TRITONSERVER_InferenceRequestDelete(request)) abort();
    sem_post(&asked->released);
}

/* -- life */

TRITONSERVER_Error *TRITONBACKEND_Initialize(TRITONBACKEND_Backend *backend) {
    (void)backend;
    return TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, give_back, NULL);
}

TRITONSERVER_Error *TRITONBACKEND_Finalize(TRITONBACKEND_Backend *backend) {
    (void)backend;
    if (buffers) abort();
    return TRITONSERVER_ResponseAllocatorDelete(allocator);
}

/* -- a call */

static const char *parameter(TRITONBACKEND_Request *request, const char *wanted) {
    uint32_t count;
    if (TRITONBACKEND_RequestParameterCount(request, &count)) abort();
    for (uint32_t at = 0; at < count; at++) {
        const char *key;
        TRITONSERVER_ParameterType type;
        const void *value;
        if (TRITONBACKEND_RequestParameter(request, at, &key, &type, &value)) abort();
        if (strcmp(key, wanted) == 0 && type == TRITONSERVER_PARAMETER_STRING) return value;
    }
    return "";
}

/* The input of the request: an odd number of numbers as they lie, an even one in two pieces. */
static TRITONSERVER_Error *add_input(TRITONSERVER_InferenceRequest *to, TRITONBACKEND_Request *from) {
    TRITONBACKEND_Input *input;
    TRITONSERVER_DataType datatype;
    TRITONSERVER_MemoryType type;
    const int64_t *shape;
    const void *base;
    uint64_t size;
    uint32_t rank;
    int64_t id;
    TRY(TRITONBACKEND_RequestInput(from, "x", &input));
    TRY(TRITONBACKEND_InputProperties(input, NULL, &datatype, &shape, &rank, NULL, NULL));
    TRY(TRITONBACKEND_InputBuffer(input, 0, &base, &size, &type, &id));
    TRY(TRITONSERVER_InferenceRequestAddInput(to, "x", datatype, shape, rank));
    if (size % 8) return TRITONSERVER_InferenceRequestAppendInputData(to, "x", base, size, type, id);
    TRY(TRITONSERVER_InferenceRequestAppendInputData(to, "x", base, size / 2, type, id));
    return TRITONSERVER_InferenceRequestAppendInputData(to, "x", (const char *)base + size / 2, size - size / 2, type,
                                                        id);
}

static TRITONSERVER_Error *prepare(TRITONSERVER_InferenceRequest *made, TRITONBACKEND_Request *request,
                                   struct Asked *asked) {
    const char *id;
    TRY(TRITONBACKEND_RequestId(request, &id));
    TRY(TRITONSERVER_InferenceRequestSetId(made, id));
    TRY(TRITONSERVER_InferenceRequestSetStringParameter(made, "by", "the caller"));
    TRY(TRITONSERVER_InferenceRequestAddRequestedOutput(made, "y"));
    TRY(add_input(made, request));
    TRY(TRITONSERVER_InferenceRequestSetReleaseCallback(made, release, asked));
    return TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, &buffers, respond, asked);
}

static TRITONSERVER_Error *ask(TRITONBACKEND_Model *model, TRITONBACKEND_Request *request, struct Asked *asked) {
    TRITONSERVER_Server *server;
    TRITONSERVER_InferenceRequest *made;
    TRY(TRITONBACKEND_ModelServer(model, &server));
    TRY(TRITONSERVER_InferenceRequestNew(&made, server, parameter(request, "model"), -1));
    TRITONSERVER_Error *failed = prepare(made, request, asked);
    if (failed == NULL) failed = TRITONSERVER_ServerInferAsync(server, made, NULL);
    if (failed) {
        TRITONSERVER_InferenceRequestDelete(made);
        return failed;
    }
    if (*parameter(request, "cancel")) TRITONSERVER_InferenceRequestCancel(made);
    while (sem_wait(&asked->released)) continue;
    return asked->failed;
}

/* -- answers */

static TRITONSERVER_Error *tell(TRITONBACKEND_Response *response, TRITONBACKEND_Model *model, const char *asked) {
    TRITONSERVER_Server *server;
    bool ready;
    uint32_t flags;
    TRY(TRITONBACKEND_ModelServer(model, &server));
    TRY(TRITONSERVER_ServerModelIsReady(server, asked, -1, &ready));
    TRY(TRITONBACKEND_ResponseSetBoolParameter(response, "ready", ready));
    if (!ready) return NULL;
    TRY(TRITONSERVER_ServerModelTransactionProperties(server, asked, -1, &flags, NULL));
    return TRITONBACKEND_ResponseSetBoolParameter(response, "decoupled", flags == TRITONSERVER_TXN_DECOUPLED);
}

static TRITONSERVER_Error *answer_with(TRITONBACKEND_Response *response, const struct Asked *asked) {
    TRITONBACKEND_Output *output;
    TRITONSERVER_MemoryType memory;
    void *buffer;
    int64_t shape[] = {1, asked->value_count}, id;
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "responses", asked->responses));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "buffers", buffers));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INT32, shape, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, 4 * asked->value_count, &memory, &id));
    memcpy(buffer, asked->values, 4 * asked->value_count);
    return NULL;
}

struct Job {
    TRITONBACKEND_Model *model;
    TRITONBACKEND_Request *request;
};

static void *work(void *given) {
    struct Job *job = given;
    TRITONBACKEND_Response *response;
    struct Asked *asked = calloc(1, sizeof *asked);
    sem_init(&asked->released, 0, 0);
    if (TRITONBACKEND_ResponseNew(&response, job->request)) abort();
    TRITONSERVER_Error *failed = tell(response, job->model, parameter(job->request, "model"));
    if (failed == NULL) failed = ask(job->model, job->request, asked);
    if (failed == NULL) failed = answer_with(response, asked);
    if (TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, failed)) abort();
    TRITONSERVER_ErrorDelete(failed);
    if (TRITONBACKEND_RequestRelease(job->request, TRITONSERVER_REQUEST_RELEASE_ALL)) abort();
    sem_destroy(&asked->released);
    free(asked);
    free(job);
    return NULL;
}

/* On a thread of its own if the request has the parameter "later". */
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *instance,
                                                       TRITONBACKEND_Request **requests, uint32_t count) {
    for (uint32_t at = 0; at < count; at++) {
        struct Job *job = malloc(sizeof *job);
        pthread_t thread;
        TRY(TRITONBACKEND_ModelInstanceModel(instance, &job->model));
        job->request = requests[at];
        if (*parameter(job->request, "later") == 0) {
            work(job);
        } else if (pthread_create(&thread, NULL, work, job) || pthread_detach(thread)) {
            abort();
        }
    }
    return NULL;
}
