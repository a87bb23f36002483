/* A backend for Triton's C API that does what the first number of its input asks for: see test_triton_api.py. */

#define _GNU_SOURCE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backends/triton_api/api.h"

enum {
    FAILS = -1,
    FAILS_WITH_ALL = -2,
    CRASHES = -3,
    FORGETS = -4,
    LATER = -5,
    SHORT = -6,
    ASKS_FOR_MORE = -7,
    COUNTS = -8,
    KEEPS = -9,
    TWICE = -10,
    REPEATS = -11,
    UNKNOWN_STATE = -12,
    RESCHEDULES = -13,
    RESCHEDULES_LATE = -14,
    ANSWERS_AND_RESCHEDULES = -15,
    GETS_UNREADY = -16,
    GETS_READY = -17,
    HANGS = -18,
    REPORTS = -19,
    PREPARES = -20,
    IS_PREPARED = -21,
    SENDS_PREPARED = -22
};

#define TRY(call)                           \
    do {                                    \
        TRITONSERVER_Error *failed_ = call; \
        if (failed_) return failed_;        \
    } while (0)

extern TRITONSERVER_Error *TRITONSERVER_ServerMetrics(TRITONSERVER_Server *server, void **metrics);

static TRITONSERVER_Metric *counted;
static TRITONSERVER_MetricFamily *family;
static volatile int unready;
static TRITONBACKEND_Response *prepared; /* by an earlier execution */

static TRITONSERVER_Error *error(TRITONSERVER_Error_Code code, const char *text) {
    return TRITONSERVER_ErrorNew(code, text);
}

/* -- life */

TRITONSERVER_Error *TRITONBACKEND_Initialize(TRITONBACKEND_Backend *backend) {
    uint32_t major, minor;
    TRITONSERVER_Message *config;
    const char *text;
    size_t size;
    TRY(TRITONBACKEND_ApiVersion(&major, &minor));
    TRY(TRITONBACKEND_BackendConfig(backend, &config));
    TRY(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
    if (strstr(text, "\"needs-major\":\"2\"") && major != 2)
        return error(TRITONSERVER_ERROR_UNSUPPORTED, "the probe needs version 2 of the API");
    TRITONSERVER_ResponseAllocator *allocator; /* as backends do that may ask other models */
    TRY(TRITONSERVER_ResponseAllocatorNew(&allocator, NULL, NULL, NULL));
    TRY(TRITONSERVER_ResponseAllocatorDelete(allocator));
    TRY(TRITONSERVER_MetricFamilyNew(&family, TRITONSERVER_METRIC_KIND_COUNTER, "probe_requests", "Requests."));
    TRITONSERVER_Parameter *label = TRITONSERVER_ParameterNew("by", TRITONSERVER_PARAMETER_STRING, "probe");
    const TRITONSERVER_Parameter *labels[] = {label};
    TRY(TRITONSERVER_MetricNew(&counted, family, labels, 1));
    TRITONSERVER_ParameterDelete(label);
    return TRITONBACKEND_BackendSetState(backend, (void *)(intptr_t)7);
}

TRITONSERVER_Error *TRITONBACKEND_Finalize(TRITONBACKEND_Backend *backend) {
    void *state;
    TRY(TRITONBACKEND_BackendState(backend, &state));
    if ((intptr_t)state != 7) abort();
    TRITONSERVER_MetricDelete(counted);
    TRITONSERVER_MetricFamilyDelete(family);
    return TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, __FILE__, __LINE__, "the probe has ended");
}

static TRITONSERVER_Error *complete(TRITONBACKEND_Model *model) {
    static const char ALL[] =
        "{\"max_batch_size\": 4,"
        "\"input\": [{\"name\": \"x\", \"data_type\": \"TYPE_INT32\", \"dims\": [-1]}],"
        "\"output\": [{\"name\": \"y\", \"data_type\": \"TYPE_INT32\", \"dims\": [-1]}]}";
    TRITONSERVER_Message *message;
    TRY(TRITONSERVER_MessageNewFromSerializedJson(&message, ALL, strlen(ALL)));
    TRITONSERVER_Error *failed = TRITONBACKEND_ModelSetConfig(model, 1, message);
    TRITONSERVER_MessageDelete(message);
    return failed;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *model) {
    TRITONSERVER_Message *config;
    const char *text, *name;
    char line[64];
    size_t size;
    bool completes;
    TRY(TRITONBACKEND_ModelName(model, &name));
    snprintf(line, sizeof line, "the probe initializes '%s'", name);
    TRY(TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, __FILE__, __LINE__, line));
    TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
    TRY(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
    TRY(TRITONBACKEND_ModelAutoCompleteConfig(model, &completes));
    bool incomplete = strstr(text, "TYPE_") == NULL;
    bool decoupled = strstr(text, "\"decoupled\":true") != NULL;
    bool refused = strstr(text, "refuse_me") != NULL;
    TRITONSERVER_MessageDelete(config);
    if (refused) return error(TRITONSERVER_ERROR_INVALID_ARG, "the probe refuses this model");
    TRY(TRITONBACKEND_ModelSetState(model, (void *)(intptr_t)decoupled));
    return completes && incomplete ? complete(model) : NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance *instance) {
    (void)instance;
    return error(TRITONSERVER_ERROR_INTERNAL, "the probe does not want to end");
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance *instance) {
    const char *name;
    TRY(TRITONBACKEND_ModelInstanceName(instance, &name));
    return unready ? error(TRITONSERVER_ERROR_UNAVAILABLE, "the probe is not ready") : NULL;
}

static void complain(TRITONSERVER_Error *failed) {
    if (failed == NULL) abort();
    TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, __FILE__, __LINE__, TRITONSERVER_ErrorMessage(failed));
    TRITONSERVER_ErrorDelete(failed);
}

/* -- answers */

static TRITONSERVER_Error *copied(TRITONBACKEND_Response *response, const char *to, TRITONBACKEND_Input *input,
                                  int32_t add) {
    TRITONSERVER_DataType datatype;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_GPU;
    const int64_t *shape;
    const void *from;
    uint64_t size;
    uint32_t rank, buffers;
    int64_t id;
    TRITONBACKEND_Output *output;
    void *buffer;
    TRY(TRITONBACKEND_InputProperties(input, NULL, &datatype, &shape, &rank, &size, &buffers));
    TRY(TRITONBACKEND_ResponseOutput(response, &output, to, datatype, shape, rank));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &id));
    if (memory != TRITONSERVER_MEMORY_CPU) abort();
    for (uint32_t at = 0; at < buffers; at++) {
        TRY(TRITONBACKEND_InputBuffer(input, at, &from, &size, &memory, &id));
        memcpy(buffer, from, size);
        buffer = (char *)buffer + size;
    }
    if (datatype == TRITONSERVER_TYPE_INT32)
        for (uint64_t at = 0; at < size / 4; at++) ((int32_t *)((char *)buffer - size))[at] += add;
    return NULL;
}

static int32_t first_of(TRITONBACKEND_Request *request) {
    TRITONBACKEND_Input *input;
    TRITONSERVER_MemoryType memory;
    const void *from;
    uint64_t size;
    int64_t id;
    TRITONSERVER_Error *failed = TRITONBACKEND_RequestInputByIndex(request, 0, &input);
    if (failed == NULL) failed = TRITONBACKEND_InputBuffer(input, 0, &from, &size, &memory, &id);
    if (failed) abort();
    int32_t first = 0;
    if (size >= 4) memcpy(&first, from, 4);
    return first;
}

static TRITONSERVER_Error *tell(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response, uint32_t count) {
    uint32_t flags, parameters, outputs;
    uint64_t sequence = 0;
    const char *id;
    bool cancelled;
    TRY(TRITONBACKEND_RequestId(request, &id));
    TRY(TRITONBACKEND_RequestFlags(request, &flags));
    TRY(TRITONBACKEND_RequestCorrelationId(request, &sequence));
    TRY(TRITONBACKEND_RequestOutputCount(request, &outputs));
    TRY(TRITONBACKEND_RequestIsCancelled(request, &cancelled));
    TRY(TRITONBACKEND_ResponseSetStringParameter(response, "id", id));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "batch", count));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "flags", flags));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "sequence", (int64_t)sequence));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "outputs", outputs));
    TRY(TRITONBACKEND_ResponseSetBoolParameter(response, "cancelled", cancelled));
    TRY(TRITONBACKEND_RequestParameterCount(request, &parameters));
    for (uint32_t at = 0; at < parameters; at++) {
        const char *key;
        TRITONSERVER_ParameterType type;
        const void *value;
        TRY(TRITONBACKEND_RequestParameter(request, at, &key, &type, &value));
        if (type == TRITONSERVER_PARAMETER_STRING) TRY(TRITONBACKEND_ResponseSetStringParameter(response, key, value));
        if (type == TRITONSERVER_PARAMETER_INT)
            TRY(TRITONBACKEND_ResponseSetIntParameter(response, key, *(const int64_t *)value));
        if (type == TRITONSERVER_PARAMETER_BOOL)
            TRY(TRITONBACKEND_ResponseSetBoolParameter(response, key, *(const bool *)value));
        if (type == TRITONSERVER_PARAMETER_DOUBLE)
            TRY(TRITONBACKEND_ResponseSetDoubleParameter(response, key, *(const double *)value));
    }
    TRY(TRITONSERVER_MetricIncrement(counted, 1));
    if (first_of(request) != COUNTS) return NULL;
    double value;
    TRY(TRITONSERVER_MetricValue(counted, &value));
    return TRITONBACKEND_ResponseSetDoubleParameter(response, "counted", value);
}

/* The sum of a sequence: the state and the input. */
static TRITONBACKEND_State *late; /* updated when the response has been sent, in the same execution */

static TRITONSERVER_Error *summed(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response,
                                  TRITONBACKEND_Input *input, TRITONBACKEND_Input *state) {
    int64_t shape[] = {1, 1}, id;
    const void *a, *b;
    uint64_t size;
    TRITONSERVER_MemoryType memory;
    TRITONBACKEND_State *next;
    TRITONBACKEND_Output *output;
    void *buffers[2];
    TRY(TRITONBACKEND_InputBuffer(input, 0, &a, &size, &memory, &id));
    TRY(TRITONBACKEND_InputBuffer(state, 0, &b, &size, &memory, &id));
    int32_t sum = *(const int32_t *)a + *(const int32_t *)b;
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INT32, shape, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffers[0], 4, &memory, &id));
    TRY(TRITONBACKEND_StateNew(&next, request, "sum_out", TRITONSERVER_TYPE_INT32, shape, 2));
    TRY(TRITONBACKEND_StateBuffer(next, &buffers[1], 4, &memory, &id));
    for (int at = 0; at < 2; at++) memcpy(buffers[at], &sum, 4);
    if (sum > 1000) { /* a state that is too long for its memory */
        shape[1] = 2;
        TRY(TRITONBACKEND_StateNew(&next, request, "sum_out", TRITONSERVER_TYPE_INT32, shape, 2));
        TRY(TRITONBACKEND_StateBuffer(next, &buffers[1], 4, &memory, &id));
    }
    if (sum == 3) { /* in the middle of the test's sequence */
        late = next;
        return NULL;
    }
    return TRITONBACKEND_StateUpdate(next);
}

/* "y" three times: the last one counts. */
static TRITONSERVER_Error *repeated(TRITONBACKEND_Response *response) {
    for (int32_t number = 1; number <= 3; number++) {
        TRITONBACKEND_Output *output;
        TRITONSERVER_MemoryType memory;
        void *buffer;
        int64_t shape[] = {1, 1}, id;
        TRY(TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INT32, shape, 2));
        TRY(TRITONBACKEND_OutputBuffer(output, &buffer, 4, &memory, &id));
        memcpy(buffer, &number, 4);
    }
    return NULL;
}

/* Adds the input to a state in memory that input and output share, without TRITONBACKEND_StateUpdate. The answer is the
 * state, or -1 if the memory of the output is not that of the input, or of the last request of the sequence. */
static TRITONSERVER_Error *added(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response,
                                 TRITONBACKEND_Input *state) {
    static const void *last;
    int64_t shape[] = {1, 1}, id;
    const void *base;
    uint64_t size;
    TRITONSERVER_MemoryType memory;
    TRITONBACKEND_State *next;
    TRITONBACKEND_Output *output;
    void *buffer, *answer;
    uint32_t flags;
    TRY(TRITONBACKEND_InputBuffer(state, 0, &base, &size, &memory, &id));
    TRY(TRITONBACKEND_StateNew(&next, request, "same_out", TRITONSERVER_TYPE_INT32, shape, 2));
    TRY(TRITONBACKEND_StateBuffer(next, &buffer, 4, &memory, &id));
    TRY(TRITONBACKEND_RequestFlags(request, &flags));
    bool same = buffer == base && (flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START || base == last);
    last = base;
    *(int32_t *)buffer += first_of(request);
    TRY(TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INT32, shape, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &answer, 4, &memory, &id));
    *(int32_t *)answer = same ? *(int32_t *)buffer : -1;
    return NULL;
}

static TRITONSERVER_Error *made(TRITONBACKEND_Request *request, TRITONBACKEND_Response *response, uint32_t count) {
    TRITONBACKEND_Input *input, *state;
    TRITONBACKEND_State *none_such;
    TRY(TRITONBACKEND_RequestInput(request, "x", &input));
    TRY(tell(request, response, count));
    TRITONSERVER_Error *none = TRITONBACKEND_RequestInput(request, "sum", &state);
    if (none == NULL) return summed(request, response, input, state);
    TRITONSERVER_ErrorDelete(none);
    none = TRITONBACKEND_RequestInput(request, "same", &state);
    if (none == NULL) return added(request, response, state);
    TRITONSERVER_ErrorDelete(none);
    if (first_of(request) == IS_PREPARED && prepared == NULL)
        return error(TRITONSERVER_ERROR_NOT_FOUND, "nothing is prepared");
    if (first_of(request) == SENDS_PREPARED) {
        TRITONBACKEND_Response *sent = prepared;
        prepared = NULL;
        TRY(TRITONBACKEND_ResponseSend(sent, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
    }
    if (first_of(request) == ASKS_FOR_MORE) return TRITONSERVER_ServerMetrics(NULL, NULL);
    if (first_of(request) == REPEATS) return repeated(response);
    if (first_of(request) == GETS_UNREADY) unready = 1;
    if (first_of(request) == GETS_READY) unready = 0;
    if (first_of(request) == UNKNOWN_STATE) {
        int64_t one = 1;
        return TRITONBACKEND_StateNew(&none_such, request, "none", TRITONSERVER_TYPE_INT32, &one, 1);
    }
    if (first_of(request) == FAILS) return error(TRITONSERVER_ERROR_NOT_FOUND, "the probe does not find it");
    if (first_of(request) == SHORT) {
        TRITONBACKEND_Output *output;
        TRITONSERVER_MemoryType memory;
        void *buffer;
        int64_t shape[] = {1, 9}, id;
        TRY(TRITONBACKEND_ResponseOutput(response, &output, "y", TRITONSERVER_TYPE_INT32, shape, 2));
        return TRITONBACKEND_OutputBuffer(output, &buffer, 4, &memory, &id);
    }
    return copied(response, "y", input, 0);
}

static void answer(TRITONBACKEND_Request *request, uint32_t count) {
    TRITONBACKEND_Response *response;
    if (TRITONBACKEND_ResponseNew(&response, request)) abort();
    TRITONSERVER_Error *failed = made(request, response, count);
    if (TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, failed)) abort();
    TRITONSERVER_ErrorDelete(failed);
    if (late && TRITONBACKEND_StateUpdate(late)) abort();
    late = NULL;
}

static void release(TRITONBACKEND_Request *request) {
    if (TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL)) abort();
}

/* If the server refuses, the request still belongs to the backend. */
static void reschedule_or_fail(TRITONBACKEND_Request *request, bool tell) {
    TRITONBACKEND_Response *response;
    TRITONSERVER_Error *refused = TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE);
    if (refused == NULL) return;
    if (tell && TRITONBACKEND_ResponseNew(&response, request)) abort();
    release(request);
    if (tell && TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, refused)) abort();
    TRITONSERVER_ErrorDelete(refused);
}

static void *answer_later(void *request) {
    answer(request, 1);
    release(request);
    return NULL;
}

/* Writes the response, which a request of a later execution has sent. */
static void prepare(TRITONBACKEND_Request *request) {
    if (prepared || TRITONBACKEND_ResponseNew(&prepared, request) || made(request, prepared, 1)) abort();
    release(request);
}

static void *reschedule_later(void *request) {
    /* when the execution has ended: the next one has begun, or the server asks whether the instance is ready */
    while (!unready) usleep(1000);
    unready = 0;
    if (TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)) abort();
    return NULL;
}

/* Until nobody waits for it any more. */
static void *keep(void *given) {
    TRITONBACKEND_Request *request = given;
    TRITONBACKEND_ResponseFactory *factory;
    TRITONBACKEND_Response *response;
    bool cancelled = false;
    if (TRITONBACKEND_ResponseFactoryNew(&factory, request)) abort();
    TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, __FILE__, __LINE__, "the probe keeps a request");
    while (!cancelled) {
        usleep(1000);
        if (TRITONBACKEND_RequestIsCancelled(request, &cancelled)) abort();
    }
    release(request);
    if (TRITONBACKEND_ResponseFactoryIsCancelled(factory, &cancelled) || !cancelled) abort();
    if (TRITONBACKEND_ResponseNewFromFactory(&response, factory)) abort();
    TRITONSERVER_Error *gone = error(TRITONSERVER_ERROR_CANCELLED, "nobody waits");
    if (TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, gone)) abort();
    TRITONSERVER_ErrorDelete(gone);
    TRITONBACKEND_ResponseFactoryDelete(factory);
    TRITONSERVER_LogMessage(TRITONSERVER_LOG_INFO, __FILE__, __LINE__, "the probe has let go of a request");
    return NULL;
}

/* Whatever is allowed once, a second time. */
static void do_it_twice(TRITONBACKEND_Request *request) {
    TRITONBACKEND_Response *response;
    answer(request, 1);
    if (TRITONBACKEND_ResponseNew(&response, request)) abort();
    complain(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
    release(request);
    complain(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
}

static TRITONSERVER_Error *put(TRITONBACKEND_Response *response, const char *name, TRITONSERVER_DataType datatype,
                               int64_t elements, const void *data, uint64_t size) {
    TRITONBACKEND_Output *output;
    TRITONSERVER_MemoryType memory;
    int64_t shape[] = {1, elements}, id;
    void *buffer;
    TRY(TRITONBACKEND_ResponseOutput(response, &output, name, datatype, shape, 2));
    TRY(TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &id));
    memcpy(buffer, data, size);
    return NULL;
}

static TRITONSERVER_Error *one_number(TRITONBACKEND_Response *response, int32_t number) {
    return put(response, "y", TRITONSERVER_TYPE_INT32, 1, &number, 4);
}

/* The number, and others of other types and sizes. */
static TRITONSERVER_Error *several_numbers(TRITONBACKEND_Response *response, int32_t number) {
    double halves[] = {number / 2.0, number, 2.0 * number};
    uint8_t odd[] = {number & 1, 1, 0, 1, 0};
    TRY(put(response, "odd", TRITONSERVER_TYPE_BOOL, 5, odd, 5));
    TRY(one_number(response, number));
    return put(response, "halves", TRITONSERVER_TYPE_FP64, 3, halves, sizeof halves);
}

/* A request of iterative sequences, which goes round as often as its input says. The state counts. If the model is
 * decoupled, each round has a response with the number of rounds that are left, sent after the request is released. */
static TRITONSERVER_Error *go_round(TRITONBACKEND_Request *request, TRITONBACKEND_Input *rounds, bool decoupled) {
    TRITONSERVER_MemoryType memory;
    TRITONBACKEND_Response *response;
    TRITONBACKEND_State *state;
    const void *base;
    uint64_t size;
    int64_t shape[] = {1, 1}, id;
    void *buffer;
    int32_t wanted = first_of(request);
    TRY(TRITONBACKEND_InputBuffer(rounds, 0, &base, &size, &memory, &id));
    int32_t done = *(const int32_t *)base + 1;
    TRY(TRITONBACKEND_ResponseNew(&response, request));
    TRY(one_number(response, decoupled ? wanted - done : done));
    if (done < wanted) {
        TRY(TRITONBACKEND_StateNew(&state, request, "rounds_out", TRITONSERVER_TYPE_INT32, shape, 2));
        TRY(TRITONBACKEND_StateBuffer(state, &buffer, 4, &memory, &id));
        memcpy(buffer, &done, 4);
        TRY(TRITONBACKEND_StateUpdate(state));
        TRY(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE));
        return decoupled ? TRITONBACKEND_ResponseSend(response, 0, NULL) : TRITONBACKEND_ResponseDelete(response);
    }
    TRY(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL));
    return TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL);
}

/* As many responses as the input says, which count up, and then the end; after the request has been released. Beyond
 * a thousand each has several outputs. */
struct Stream {
    TRITONBACKEND_ResponseFactory *factory;
    int32_t count;
    bool several;
};

static void *stream(void *given) {
    struct Stream *stream = given;
    for (int32_t number = 0; number < stream->count; number++) {
        TRITONBACKEND_Response *response;
        if (TRITONBACKEND_ResponseNewFromFactory(&response, stream->factory)) abort();
        if (stream->several ? several_numbers(response, number) : one_number(response, number)) abort();
        if (TRITONBACKEND_ResponseSend(response, 0, NULL)) abort();
    }
    if (TRITONBACKEND_ResponseFactorySendFlags(stream->factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL)) abort();
    TRITONBACKEND_ResponseFactoryDelete(stream->factory);
    free(stream);
    return NULL;
}

/* One report. `error` has code `failed`; -1: there is none. */
static TRITONSERVER_Error *report(TRITONBACKEND_ResponseFactory *factory, uint64_t begin, uint64_t output, uint64_t end,
                                  int failed) {
    TRITONBACKEND_ModelInstanceResponseStatistics *statistics;
    TRITONSERVER_Error *given = failed < 0 ? NULL : error(failed, "for a report");
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsNew(&statistics));
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(statistics, factory));
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(statistics, begin));
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(statistics, output));
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(statistics, end));
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsSetError(statistics, given));
    TRITONSERVER_Error *refused = TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics);
    TRITONSERVER_ErrorDelete(given);
    TRY(TRITONBACKEND_ModelInstanceResponseStatisticsDelete(statistics));
    return refused;
}

/* One response, and reports of responses of every kind; the last report follows the end of the responses. */
static void *report_all(void *given) {
    TRITONBACKEND_ResponseFactory *factory = given;
    TRITONBACKEND_Response *response;
    if (TRITONBACKEND_ResponseNewFromFactory(&response, factory) || one_number(response, 1)) abort();
    if (TRITONBACKEND_ResponseSend(response, 0, NULL)) abort();
    if (report(factory, 1000, 1400, 1600, -1)) abort();
    if (report(factory, 1000, 1300, 1500, TRITONSERVER_ERROR_UNKNOWN)) abort();
    if (report(factory, 1000, 0, 1700, TRITONSERVER_ERROR_INTERNAL)) abort();
    if (report(factory, 1000, 0, 1800, -1)) abort();
    if (report(factory, 1000, 1400, 1900, TRITONSERVER_ERROR_CANCELLED)) abort();
    complain(report(factory, 1000, 900, 1600, -1));
    complain(report(factory, 1000, 1600, 1500, -1));
    if (TRITONBACKEND_ResponseFactorySendFlags(factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL)) abort();
    if (report(factory, 1000, 1001, 1003, -1)) abort();
    TRITONBACKEND_ResponseFactoryDelete(factory);
    return NULL;
}

/* A decoupled request with a state whose input and output have the same memory. Its first response, 1, or -1 if the
 * memory is not that of the last such request, leaves during its execution; the end follows during the execution of the
 * next request, one with the number 0: with another response, or if the number is 2 without. The factory is never
 * deleted. */
static void answer_in_turns(TRITONBACKEND_Request *request, TRITONBACKEND_Input *state) {
    static TRITONBACKEND_ResponseFactory *unfinished;
    static int32_t number;
    static const void *last;
    TRITONBACKEND_ResponseFactory *factory;
    TRITONBACKEND_Response *response;
    TRITONSERVER_MemoryType memory;
    const void *base;
    uint64_t size;
    uint32_t flags;
    int64_t id;
    int32_t first = first_of(request);
    if (TRITONBACKEND_ResponseFactoryNew(&factory, request)) abort();
    if (first == 0) {
        if (number == 2) {
            if (TRITONBACKEND_ResponseFactorySendFlags(unfinished, TRITONSERVER_RESPONSE_COMPLETE_FINAL)) abort();
        } else {
            if (TRITONBACKEND_ResponseNewFromFactory(&response, unfinished) || one_number(response, 0)) abort();
            if (TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL)) abort();
        }
        if (TRITONBACKEND_ResponseNewFromFactory(&response, factory) || one_number(response, 0)) abort();
        if (TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, NULL)) abort();
        release(request);
        return;
    }
    if (TRITONBACKEND_InputBuffer(state, 0, &base, &size, &memory, &id)) abort();
    if (TRITONBACKEND_RequestFlags(request, &flags)) abort();
    bool same = flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START || base == last;
    last = base;
    unfinished = factory;
    number = first;
    if (TRITONBACKEND_ResponseNewFromFactory(&response, factory) || one_number(response, same ? 1 : -1)) abort();
    if (TRITONBACKEND_ResponseSend(response, 0, NULL)) abort();
    release(request);
}

static void start(void *(*function)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, argument) || pthread_detach(thread)) abort();
}

static void start_stream(TRITONBACKEND_Request *request) {
    struct Stream *made = malloc(sizeof *made);
    made->several = first_of(request) > 1000;
    made->count = first_of(request) % 1000;
    if (TRITONBACKEND_ResponseFactoryNew(&made->factory, request)) abort();
    release(request);
    start(stream, made);
}

static void start_reports(TRITONBACKEND_Request *request) {
    TRITONBACKEND_ResponseFactory *factory;
    if (TRITONBACKEND_ResponseFactoryNew(&factory, request)) abort();
    release(request);
    start(report_all, factory);
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *instance,
                                                       TRITONBACKEND_Request **requests, uint32_t count) {
    TRITONBACKEND_Model *model;
    void *decoupled;
    TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
    TRY(TRITONBACKEND_ModelState(model, &decoupled));
    if (first_of(requests[0]) == FAILS_WITH_ALL) return error(TRITONSERVER_ERROR_UNAVAILABLE, "the probe is not there");
    for (uint32_t at = 0; at < count; at++) {
        int32_t first = first_of(requests[at]);
        TRITONBACKEND_Input *rounds, *same;
        TRITONSERVER_Error *none = TRITONBACKEND_RequestInput(requests[at], "rounds", &rounds);
        TRITONSERVER_ErrorDelete(none);
        TRITONSERVER_Error *no_state = TRITONBACKEND_RequestInput(requests[at], "same", &same);
        TRITONSERVER_ErrorDelete(no_state);
        if (first == CRASHES) *(volatile int *)8 = 0;
        if (first == HANGS)
            for (;;) pause();
        if (none == NULL && first >= 0) {
            if (go_round(requests[at], rounds, decoupled != NULL)) abort();
        } else if (decoupled && no_state == NULL) {
            answer_in_turns(requests[at], same);
        } else if (decoupled && first >= 0) {
            start_stream(requests[at]);
        } else if (first == REPORTS) {
            start_reports(requests[at]);
        } else if (first == LATER) {
            start(answer_later, requests[at]);
        } else if (first == PREPARES) {
            prepare(requests[at]);
        } else if (first == KEEPS) {
            start(keep, requests[at]);
        } else if (first == RESCHEDULES_LATE) {
            start(reschedule_later, requests[at]);
        } else if (first == TWICE) {
            do_it_twice(requests[at]);
        } else if (first == RESCHEDULES || first == ANSWERS_AND_RESCHEDULES) {
            if (first == ANSWERS_AND_RESCHEDULES) answer(requests[at], count);
            reschedule_or_fail(requests[at], first == RESCHEDULES);
        } else {
            if (first != FORGETS) answer(requests[at], count);
            release(requests[at]);
        }
    }
    return NULL;
}
