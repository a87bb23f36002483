/* The structures behind the handles of the API, and the functions of the host (_host.pyx) that the API calls. */

#ifndef INFERD_TRITON_OBJECTS_H
#define INFERD_TRITON_OBJECTS_H

#include <stdatomic.h>

#include "api.h"

#define INTERNAL __attribute__((visibility("hidden")))

enum {
    MOST_DIMENSIONS = 16,
    MOST_OUTPUTS = 4096,
    ALIGNMENT = 64,
    SENT_IN_RECORD = 4096 /* bytes of an output that the worker copies into its record: SMALL of inferd_worker.serialization */
};

struct TRITONSERVER_Error {
    TRITONSERVER_Error_Code code;
    char text[];
};

struct TRITONSERVER_Message {
    size_t size;
    char text[]; /* ends with a zero, which `size` does not count */
};

struct TRITONSERVER_Parameter {
    char *name;
    TRITONSERVER_ParameterType type;
    union {
        int64_t integer;
        bool flag;
        double number;
    } plain;
    void *text; /* of STRING and BYTES */
    uint64_t size;
    struct TRITONSERVER_Parameter *next; /* of a response */
};

struct TRITONSERVER_BufferAttributes {
    size_t byte_size;
    TRITONSERVER_MemoryType memory_type;
    int64_t memory_type_id;
    void *cuda_ipc_handle;
};

/* An input, an output or a state: handles of all three point to one. */
struct Tensor {
    const char *name;
    TRITONSERVER_DataType datatype;
    uint32_t rank;
    int64_t shape[MOST_DIMENSIONS];
    void *base;
    struct TRITONSERVER_BufferAttributes attributes;
    bool updated;        /* of a state: it goes with the next response */
    bool shared;         /* of a state: `base` belongs to a struct Shared */
    bool granted;        /* of an output: `base` lies in the request's grant */
    struct TRITONBACKEND_Request *request; /* of a state or an output */
    struct Tensor *next; /* of a response or a request */
};

struct TRITONBACKEND_Input {
    struct Tensor tensor;
};

struct TRITONBACKEND_Output {
    struct Tensor tensor;
};

struct TRITONBACKEND_State {
    struct Tensor tensor;
};

/* The memory of a state that input and output have in common (use_same_buffer_for_input_output). The host keeps it from
 * request to request of a sequence. */
struct Shared {
    void *base;
    size_t size;
    void *before; /* the input, where the output has grown out of it */
};

/* Memory of the server for outputs of one batch: responses that lie in it need not be copied. Threads of the backend take
 * from it without a lock; when the execution is over, nothing is left. */
struct Grant {
    atomic_uintptr_t at; /* where the free rest begins */
    uintptr_t end;
    atomic_int tensors; /* how many lie in it that the backend has neither sent nor deleted */
};

struct TRITONBACKEND_Request {
    atomic_int references; /* one until the request is released, one for each factory and response */
    atomic_bool released;
    bool reschedulable; /* the model has iterative sequences */
    void *owner; /* the host's object, of which this is a part */
    const char *model;
    const char *id;
    const char *correlation_text;
    uint64_t correlation_id;
    uint64_t timeout;
    uint32_t flags;
    uint32_t input_count;
    struct TRITONBACKEND_Input *inputs;
    uint32_t output_count;
    const char **outputs;
    uint32_t parameter_count;
    struct TRITONSERVER_Parameter *parameters;
    const char **state_names; /* of the model; NULL behind the last */
    struct Shared **shared; /* for each of these states; NULL where input and output have memory of their own */
    struct Tensor *states;
    struct Grant *grant; /* of its batch: the requests of a batch share it */
    bool sent; /* the last response has been sent, so no state can go with it any more */
    atomic_uint reported; /* responses whose times the backend has reported */
};

struct TRITONBACKEND_ResponseFactory {
    TRITONBACKEND_Request *request;
};

struct TRITONBACKEND_ModelInstanceResponseStatistics {
    TRITONBACKEND_ResponseFactory *factory;
    uint64_t start;
    uint64_t output; /* 0: the response has no outputs */
    uint64_t end;
    TRITONSERVER_Error *error;
};

struct TRITONBACKEND_Response {
    TRITONBACKEND_Request *request;
    struct Tensor *outputs; /* in the order in which they were made */
    struct Tensor **last_output;
    uint32_t output_count;
    struct TRITONSERVER_Parameter *parameters;
    TRITONSERVER_Parameter **last_parameter;
};

/* Requests of a backend to other models, and their responses */

struct TRITONSERVER_ResponseAllocator {
    AllocateFunction allocate;
    FreeFunction release;
    StartFunction start;
};

struct Piece {
    const void *base;
    size_t size;
};

struct CallInput {
    struct Tensor *tensor;
    struct Piece *pieces; /* of the data, in order */
    uint32_t piece_count;
    struct CallInput *next;
};

struct Name {
    struct Name *next;
    char text[];
};

struct TRITONSERVER_InferenceRequest {
    char *model;
    int64_t version; /* -1: the latest */
    char *id;
    char *correlation_text;
    uint64_t correlation_id;
    uint64_t priority;
    uint64_t timeout;
    uint32_t flags;
    bool cancelled;
    struct CallInput *inputs;
    struct Name *outputs;
    TRITONSERVER_Parameter *parameters;
    TRITONSERVER_ResponseAllocator *allocator;
    void *allocator_data;
    ResponseFunction respond;
    void *respond_data;
    ReleaseFunction release;
    void *release_data;
    void *call; /* the host's object, while the request waits for responses */
};

struct ReceivedOutput {
    struct Tensor *tensor;
    void *buffer; /* from the allocator */
    void *buffer_data;
};

struct TRITONSERVER_InferenceResponse {
    TRITONSERVER_Error *error;
    char *model;
    int64_t version;
    char *id;
    TRITONSERVER_ResponseAllocator *allocator;
    void *allocator_data;
    struct ReceivedOutput *outputs;
    uint32_t output_count;
    uint32_t parameter_count;
    TRITONSERVER_Parameter *parameters;
    TRITONSERVER_Parameter **last_parameter;
};

struct TRITONBACKEND_Backend {
    const char *name;
    const char *folder;
    TRITONSERVER_Message *config;
    TRITONBACKEND_ExecutionPolicy policy;
    void *state;
};

struct TRITONBACKEND_Model {
    TRITONBACKEND_Backend *backend;
    const char *name;
    const char *folder;
    uint64_t version;
    TRITONSERVER_Message *config;
    bool completes; /* the backend may complete the configuration */
    void *state;
};

struct TRITONBACKEND_ModelInstance {
    TRITONBACKEND_Model *model;
    const char *name;
    TRITONSERVER_InstanceGroupKind kind;
    int32_t device;
    TRITONSERVER_Message *host_policy;
    void *state;
};

/* Functions of the host. They may be called on any thread, without the GIL. */
struct Host {
    void (*log)(TRITONSERVER_LogLevel level, const char *file, int line, const char *text);
    bool (*logs)(TRITONSERVER_LogLevel level);
    bool (*is_cancelled)(void *owner);
    void (*released)(void *owner, uint32_t flags);
    /* `response` is NULL if only the flags are sent. The caller keeps it, but the host takes the memory of outputs. */
    TRITONSERVER_Error *(*send)(void *owner, TRITONBACKEND_Response *response, uint32_t flags,
                                TRITONSERVER_Error *error);
    void (*report)(void *owner, int kind, uint32_t index, uint64_t infer_ns, uint64_t output_ns); /* see STATISTICS */
    void (*forget)(void *owner); /* the last reference to a request has been dropped */
    TRITONSERVER_Error *(*new_family)(TRITONSERVER_MetricFamily **family, TRITONSERVER_MetricKind kind,
                                      const char *name, const char *description);
    TRITONSERVER_Error *(*new_metric)(TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family,
                                      const TRITONSERVER_Parameter **labels, uint64_t count,
                                      const TRITONSERVER_MetricArgs *arguments);
    TRITONSERVER_Error *(*measure)(TRITONSERVER_Metric *metric, const char *what, double *value);
    TRITONSERVER_Error *(*kind_of)(void *measured, TRITONSERVER_MetricKind *kind);
    void (*let_go)(void *measured); /* of a family or a metric */
    TRITONSERVER_Error *(*call)(TRITONSERVER_InferenceRequest *request); /* its callbacks get the responses */
    void (*cancel)(TRITONSERVER_InferenceRequest *request);
    TRITONSERVER_Error *(*is_ready)(const char *model, int64_t version, bool *ready);
    TRITONSERVER_Error *(*is_decoupled)(const char *model, int64_t version, bool *decoupled);
    TRITONSERVER_Error *(*load_model)(const char *model, const TRITONSERVER_Parameter **parameters, uint64_t count);
    TRITONSERVER_Error *(*unload_model)(const char *model, bool dependents);
};

struct TRITONSERVER_MetricArgs {
    uint64_t count;
    double *buckets;
};

INTERNAL extern struct Host inferd_host;

INTERNAL TRITONSERVER_Error *inferd_refuse(TRITONSERVER_Error_Code code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
INTERNAL TRITONSERVER_Message *inferd_message(const char *text, size_t size);
INTERNAL TRITONSERVER_Error *inferd_new_tensor(struct Tensor **tensor, const char *kind, const char *name,
                                               TRITONSERVER_DataType datatype, const int64_t *shape, uint64_t rank);
INTERNAL bool inferd_resize(struct Shared *shared, size_t size); /* keeps the content; false: no memory */
INTERNAL void inferd_free_tensors(struct Tensor *first);
INTERNAL void inferd_open_grant(struct Grant *grant, uintptr_t at, uintptr_t end);
INTERNAL uintptr_t inferd_close_grant(struct Grant *grant); /* returns where the free rest begins */
INTERNAL bool inferd_uses_grant(struct Grant *grant); /* whether the backend may still write to a part of it */
INTERNAL void inferd_free_parameters(TRITONSERVER_Parameter *first);
INTERNAL void inferd_drop(TRITONBACKEND_Request *request); /* drops one reference */

/* The response of another model to a request of the backend, and its parts */
INTERNAL TRITONSERVER_InferenceResponse *inferd_new_response(const TRITONSERVER_InferenceRequest *request);
INTERNAL TRITONSERVER_Error *inferd_start_response(TRITONSERVER_InferenceResponse *response);
INTERNAL TRITONSERVER_Error *inferd_add_output(TRITONSERVER_InferenceResponse *response, const char *name,
                                                 TRITONSERVER_DataType datatype, const int64_t *shape, uint32_t rank,
                                                 const void *data, size_t size);
INTERNAL TRITONSERVER_Error *inferd_add_parameter(TRITONSERVER_InferenceResponse *response, const char *name,
                                                  TRITONSERVER_ParameterType type, const void *value);

#endif
