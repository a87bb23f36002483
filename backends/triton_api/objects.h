/* What the handles of the API point to, and what the functions ask of the host, which is _host.pyx. */

#ifndef INFERD_TRITON_OBJECTS_H
#define INFERD_TRITON_OBJECTS_H

#include <stdatomic.h>

#include "api.h"

#define INTERNAL __attribute__((visibility("hidden")))

enum { MOST_DIMENSIONS = 16, MOST_OUTPUTS = 4096, ALIGNMENT = 64 };

struct TRITONSERVER_Error {
    TRITONSERVER_Error_Code code;
    char text[];
};

struct TRITONSERVER_Message {
    size_t size;
    char text[]; /* with a zero behind it */
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
    bool updated;        /* of a state: it is to be kept */
    struct TRITONBACKEND_Request *request; /* of a state */
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

struct TRITONBACKEND_Request {
    atomic_int references; /* one until the request is released, one for each factory and response */
    void *owner;           /* the host's object, which this is a part of */
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
    struct Tensor *states;
    bool sent; /* its last response has gone: no state can go with it any more */
};

struct TRITONBACKEND_ResponseFactory {
    TRITONBACKEND_Request *request;
};

struct TRITONBACKEND_Response {
    TRITONBACKEND_Request *request;
    struct Tensor *outputs; /* in the order in which they were made */
    struct Tensor **last_output;
    uint32_t output_count;
    struct TRITONSERVER_Parameter *parameters;
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

/* What the host does. Called on any thread, without Python's lock. */
struct Host {
    void (*log)(TRITONSERVER_LogLevel level, const char *file, int line, const char *text);
    bool (*logs)(TRITONSERVER_LogLevel level);
    bool (*is_cancelled)(void *owner);
    void (*released)(void *owner, uint32_t flags);
    /* `response` is NULL where the flags alone are sent; it stays the caller's, but for the memory that is taken */
    TRITONSERVER_Error *(*send)(void *owner, TRITONBACKEND_Response *response, uint32_t flags,
                                TRITONSERVER_Error *error);
    void (*forget)(void *owner); /* the last reference to a request has gone */
    TRITONSERVER_Error *(*new_family)(TRITONSERVER_MetricFamily **family, TRITONSERVER_MetricKind kind,
                                      const char *name, const char *description);
    TRITONSERVER_Error *(*new_metric)(TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family,
                                      const TRITONSERVER_Parameter **labels, uint64_t count,
                                      const TRITONSERVER_MetricArgs *arguments);
    TRITONSERVER_Error *(*measure)(TRITONSERVER_Metric *metric, const char *what, double *value);
    TRITONSERVER_Error *(*kind_of)(void *measured, TRITONSERVER_MetricKind *kind);
    void (*let_go)(void *measured); /* of a family or a metric */
};

struct TRITONSERVER_MetricArgs {
    uint64_t count;
    double *buckets;
};

INTERNAL extern struct Host inferd_host;

INTERNAL TRITONSERVER_Error *inferd_refuse(TRITONSERVER_Error_Code code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
INTERNAL TRITONSERVER_Message *inferd_message(const char *text, size_t size);
INTERNAL void inferd_free_tensors(struct Tensor *first);
INTERNAL void inferd_drop(TRITONBACKEND_Request *request); /* one reference */

#endif
