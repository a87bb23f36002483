/* Errors, log, messages, parameters, attributes of buffers, and metrics. */

#define _POSIX_C_SOURCE 200809L

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

struct Host inferd_host;

/* ------------------------------------------------------------------------------------------------------------------ */
/* Versions and names */

TRITONSERVER_Error *TRITONSERVER_ApiVersion(uint32_t *major, uint32_t *minor) {
    *major = TRITONSERVER_API_VERSION_MAJOR;
    *minor = TRITONSERVER_API_VERSION_MINOR;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ApiVersion(uint32_t *major, uint32_t *minor) {
    *major = TRITONBACKEND_API_VERSION_MAJOR;
    *minor = TRITONBACKEND_API_VERSION_MINOR;
    return NULL;
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const struct {
    const char *name;
    uint32_t size;
} DATATYPES[] = {
    {"<invalid>", 0}, {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8}, {"INT8", 1}, {"INT16", 2},
    {"INT32", 4},     {"INT64", 8}, {"FP16", 2},  {"FP32", 4},   {"FP64", 8},   {"BYTES", 0},  {"BF16", 2},
};

const char *TRITONSERVER_DataTypeString(TRITONSERVER_DataType datatype) {
    return DATATYPES[(unsigned)datatype < COUNT(DATATYPES) ? datatype : 0].name;
}

uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType datatype) {
    return DATATYPES[(unsigned)datatype < COUNT(DATATYPES) ? datatype : 0].size;
}

TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char *name) {
    for (unsigned each = 1; each < COUNT(DATATYPES); each++)
        if (strcmp(name, DATATYPES[each].name) == 0) return (TRITONSERVER_DataType)each;
    return TRITONSERVER_TYPE_INVALID;
}

static const char *named(const char *const *names, size_t count, int number) {
    return (unsigned)number < count ? names[number] : "<invalid>";
}

const char *TRITONSERVER_MemoryTypeString(TRITONSERVER_MemoryType type) {
    static const char *const NAMES[] = {"CPU", "CPU_PINNED", "GPU"};
    return named(NAMES, COUNT(NAMES), type);
}

const char *TRITONSERVER_ParameterTypeString(TRITONSERVER_ParameterType type) {
    static const char *const NAMES[] = {"STRING", "INT", "BOOL", "DOUBLE", "BYTES"};
    return named(NAMES, COUNT(NAMES), type);
}

const char *TRITONSERVER_InstanceGroupKindString(TRITONSERVER_InstanceGroupKind kind) {
    static const char *const NAMES[] = {"AUTO", "CPU", "GPU", "MODEL"};
    return named(NAMES, COUNT(NAMES), kind);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Errors and log */

TRITONSERVER_Error *TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char *text) {
    size_t size = strlen(text ? text : "") + 1;
    TRITONSERVER_Error *error = malloc(sizeof *error + size);
    if (error == NULL) abort(); /* NULL would mean success */
    error->code = code;
    memcpy(error->text, text ? text : "", size);
    return error;
}

TRITONSERVER_Error *inferd_refuse(TRITONSERVER_Error_Code code, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return TRITONSERVER_ErrorNew(code, text);
}

void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error) { free(error); }

TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error *error) { return error->code; }

const char *TRITONSERVER_ErrorCodeString(TRITONSERVER_Error *error) {
    static const char *const NAMES[] = {"Unknown",     "Internal",    "Not found",      "Invalid argument",
                                        "Unavailable", "Unsupported", "Already exists", "Cancelled"};
    return named(NAMES, COUNT(NAMES), error->code);
}

const char *TRITONSERVER_ErrorMessage(TRITONSERVER_Error *error) { return error->text; }

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level) { return inferd_host.logs(level); }

TRITONSERVER_Error *TRITONSERVER_LogMessage(TRITONSERVER_LogLevel level, const char *file, int line, const char *text) {
    if (inferd_host.logs(level)) inferd_host.log(level, file, line, text);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Messages */

TRITONSERVER_Message *inferd_message(const char *text, size_t size) {
    TRITONSERVER_Message *message = malloc(sizeof *message + size + 1);
    if (message == NULL) return NULL;
    message->size = size;
    memcpy(message->text, text, size);
    message->text[size] = 0;
    return message;
}

TRITONSERVER_Error *TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message **message, const char *text,
                                                              size_t size) {
    *message = inferd_message(text, size);
    return *message ? NULL : inferd_refuse(TRITONSERVER_ERROR_INTERNAL, "no memory for a message of %zu bytes", size);
}

TRITONSERVER_Error *TRITONSERVER_MessageDelete(TRITONSERVER_Message *message) {
    free(message);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message *message, const char **text,
                                                        size_t *size) {
    *text = message->text;
    *size = message->size;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Parameters */

/* The parameter, or NULL if there was no memory for a part of it. */
static TRITONSERVER_Parameter *whole(TRITONSERVER_Parameter *parameter) {
    bool has_text = parameter->type == TRITONSERVER_PARAMETER_STRING || parameter->type == TRITONSERVER_PARAMETER_BYTES;
    if (parameter->name && (parameter->text || !has_text)) return parameter;
    TRITONSERVER_ParameterDelete(parameter);
    return NULL;
}

TRITONSERVER_Parameter *TRITONSERVER_ParameterNew(const char *name, TRITONSERVER_ParameterType type,
                                                  const void *value) {
    if (name == NULL || value == NULL || (unsigned)type > TRITONSERVER_PARAMETER_DOUBLE) return NULL;
    TRITONSERVER_Parameter *parameter = calloc(1, sizeof *parameter);
    if (parameter == NULL) return NULL;
    parameter->name = strdup(name);
    parameter->type = type;
    switch (type) {
        case TRITONSERVER_PARAMETER_STRING:
            parameter->size = strlen(value);
            parameter->text = strdup(value);
            break;
        case TRITONSERVER_PARAMETER_INT:
            parameter->plain.integer = *(const int64_t *)value;
            break;
        case TRITONSERVER_PARAMETER_BOOL:
            parameter->plain.flag = *(const bool *)value;
            break;
        default:
            parameter->plain.number = *(const double *)value;
    }
    return whole(parameter);
}

TRITONSERVER_Parameter *TRITONSERVER_ParameterBytesNew(const char *name, const void *bytes, uint64_t size) {
    if (name == NULL || (bytes == NULL && size)) return NULL;
    TRITONSERVER_Parameter *parameter = calloc(1, sizeof *parameter);
    if (parameter == NULL) return NULL;
    parameter->name = strdup(name);
    parameter->type = TRITONSERVER_PARAMETER_BYTES;
    parameter->text = malloc(size ? size : 1);
    parameter->size = size;
    if (parameter->text && size) memcpy(parameter->text, bytes, size);
    return whole(parameter);
}

void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter *parameter) {
    if (parameter == NULL) return;
    free(parameter->name);
    free(parameter->text);
    free(parameter);
}

void inferd_free_parameters(TRITONSERVER_Parameter *first) {
    while (first) {
        TRITONSERVER_Parameter *next = first->next;
        TRITONSERVER_ParameterDelete(first);
        first = next;
    }
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Attributes of buffers */

TRITONSERVER_Error *TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes **attributes) {
    *attributes = calloc(1, sizeof **attributes);
    return *attributes ? NULL : inferd_refuse(TRITONSERVER_ERROR_INTERNAL, "no memory for attributes of a buffer");
}

TRITONSERVER_Error *TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes *attributes) {
    free(attributes);
    return NULL;
}

#define ATTRIBUTE(name, type, field)                                                                                  \
    TRITONSERVER_Error *TRITONSERVER_BufferAttributesSet##name(TRITONSERVER_BufferAttributes *attributes, type value) { \
        attributes->field = value;                                                                                    \
        return NULL;                                                                                                  \
    }                                                                                                                 \
    TRITONSERVER_Error *TRITONSERVER_BufferAttributes##name(TRITONSERVER_BufferAttributes *attributes, type *value) {   \
        *value = attributes->field;                                                                                   \
        return NULL;                                                                                                  \
    }

ATTRIBUTE(MemoryTypeId, int64_t, memory_type_id)
ATTRIBUTE(MemoryType, TRITONSERVER_MemoryType, memory_type)
ATTRIBUTE(CudaIpcHandle, void *, cuda_ipc_handle)
ATTRIBUTE(ByteSize, size_t, byte_size)

/* ------------------------------------------------------------------------------------------------------------------ */
/* Metrics and traces */

TRITONSERVER_Error *TRITONSERVER_MetricFamilyNew(TRITONSERVER_MetricFamily **family, TRITONSERVER_MetricKind kind,
                                                 const char *name, const char *description) {
    return inferd_host.new_family(family, kind, name, description);
}

TRITONSERVER_Error *TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily *family) {
    inferd_host.let_go(family);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_GetMetricFamilyKind(TRITONSERVER_MetricFamily *family,
                                                     TRITONSERVER_MetricKind *kind) {
    return inferd_host.kind_of(family, kind);
}

TRITONSERVER_Error *TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs **arguments) {
    *arguments = calloc(1, sizeof **arguments);
    return *arguments ? NULL : inferd_refuse(TRITONSERVER_ERROR_INTERNAL, "no memory for arguments of a metric");
}

TRITONSERVER_Error *TRITONSERVER_MetricArgsSetHistogram(TRITONSERVER_MetricArgs *arguments, const double *buckets,
                                                        uint64_t count) {
    double *copy = malloc((count ? count : 1) * sizeof *copy);
    if (copy == NULL) return inferd_refuse(TRITONSERVER_ERROR_INTERNAL, "no memory for the buckets of a histogram");
    memcpy(copy, buckets, count * sizeof *copy);
    free(arguments->buckets);
    arguments->buckets = copy;
    arguments->count = count;
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs *arguments) {
    if (arguments) free(arguments->buckets);
    free(arguments);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricNew(TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family,
                                           const TRITONSERVER_Parameter **labels, uint64_t count) {
    return inferd_host.new_metric(metric, family, labels, count, NULL);
}

TRITONSERVER_Error *TRITONSERVER_MetricNewWithArgs(TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family,
                                                   const TRITONSERVER_Parameter **labels, uint64_t count,
                                                   const TRITONSERVER_MetricArgs *arguments) {
    return inferd_host.new_metric(metric, family, labels, count, arguments);
}

TRITONSERVER_Error *TRITONSERVER_MetricDelete(TRITONSERVER_Metric *metric) {
    inferd_host.let_go(metric);
    return NULL;
}

TRITONSERVER_Error *TRITONSERVER_MetricValue(TRITONSERVER_Metric *metric, double *value) {
    return inferd_host.measure(metric, "value", value);
}

TRITONSERVER_Error *TRITONSERVER_MetricIncrement(TRITONSERVER_Metric *metric, double value) {
    return inferd_host.measure(metric, "increment", &value);
}

TRITONSERVER_Error *TRITONSERVER_MetricSet(TRITONSERVER_Metric *metric, double value) {
    return inferd_host.measure(metric, "set", &value);
}

TRITONSERVER_Error *TRITONSERVER_MetricObserve(TRITONSERVER_Metric *metric, double value) {
    return inferd_host.measure(metric, "observe", &value);
}

TRITONSERVER_Error *TRITONSERVER_GetMetricKind(TRITONSERVER_Metric *metric, TRITONSERVER_MetricKind *kind) {
    return inferd_host.kind_of(metric, kind);
}

TRITONSERVER_Error *TRITONSERVER_InferenceTraceReportActivity(TRITONSERVER_InferenceTrace *trace, uint64_t timestamp,
                                                              const char *activity) {
    (void)trace, (void)timestamp, (void)activity; /* no request has a trace: see TRITONBACKEND_RequestTrace */
    return NULL;
}
