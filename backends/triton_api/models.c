/* Backends, models and instances, and memory for them. */

#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>

#include "objects.h"

/* ------------------------------------------------------------------------------------------------------------------ */
/* Memory */

TRITONSERVER_Error *TRITONBACKEND_MemoryManagerAllocate(TRITONBACKEND_MemoryManager *manager, void **buffer,
                                                        TRITONSERVER_MemoryType memory_type, int64_t memory_type_id,
                                                        uint64_t byte_size) {
    (void)manager, (void)memory_type_id;
    if (memory_type != TRITONSERVER_MEMORY_CPU)
        return inferd_refuse(TRITONSERVER_ERROR_UNSUPPORTED, "memory of type %s is not allocated here: expected CPU",
                             TRITONSERVER_MemoryTypeString(memory_type));
    if (posix_memalign(buffer, ALIGNMENT, byte_size ? byte_size : 1) != 0)
        return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for %llu bytes", (unsigned long long)byte_size);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_MemoryManagerFree(TRITONBACKEND_MemoryManager *manager, void *buffer,
                                                    TRITONSERVER_MemoryType memory_type, int64_t memory_type_id) {
    (void)manager, (void)memory_type, (void)memory_type_id;
    free(buffer);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Backends */

#define GETTER(function, handle, type, expression)             \
    TRITONSERVER_Error *function(handle *object, type *value) { \
        *value = expression;                                   \
        return NULL;                                           \
    }

#define STATE(name, handle)                                                          \
    GETTER(TRITONBACKEND_##name##State, handle, void *, object->state)               \
    TRITONSERVER_Error *TRITONBACKEND_##name##SetState(handle *object, void *state) { \
        object->state = state;                                                       \
        return NULL;                                                                 \
    }

GETTER(TRITONBACKEND_BackendName, TRITONBACKEND_Backend, const char *, object->name)
GETTER(TRITONBACKEND_BackendConfig, TRITONBACKEND_Backend, TRITONSERVER_Message *, object->config)
GETTER(TRITONBACKEND_BackendExecutionPolicy, TRITONBACKEND_Backend, TRITONBACKEND_ExecutionPolicy, object->policy)
GETTER(TRITONBACKEND_BackendMemoryManager, TRITONBACKEND_Backend, TRITONBACKEND_MemoryManager *,
       (TRITONBACKEND_MemoryManager *)object)
STATE(Backend, TRITONBACKEND_Backend)

TRITONSERVER_Error *TRITONBACKEND_BackendSetExecutionPolicy(TRITONBACKEND_Backend *backend,
                                                            TRITONBACKEND_ExecutionPolicy policy) {
    backend->policy = policy; /* each instance has a process of its own, so both policies mean the same */
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_BackendArtifacts(TRITONBACKEND_Backend *backend, TRITONBACKEND_ArtifactType *type,
                                                   const char **location) {
    *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
    *location = backend->folder;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Models */

GETTER(TRITONBACKEND_ModelName, TRITONBACKEND_Model, const char *, object->name)
GETTER(TRITONBACKEND_ModelVersion, TRITONBACKEND_Model, uint64_t, object->version)
GETTER(TRITONBACKEND_ModelAutoCompleteConfig, TRITONBACKEND_Model, bool, object->completes)
GETTER(TRITONBACKEND_ModelBackend, TRITONBACKEND_Model, TRITONBACKEND_Backend *, object->backend)
/* Functions that take a server do not use it, so any pointer will do. */
GETTER(TRITONBACKEND_ModelServer, TRITONBACKEND_Model, TRITONSERVER_Server *, (TRITONSERVER_Server *)object)
STATE(Model, TRITONBACKEND_Model)

TRITONSERVER_Error *TRITONBACKEND_ModelRepository(TRITONBACKEND_Model *model, TRITONBACKEND_ArtifactType *type,
                                                  const char **location) {
    *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
    *location = model->folder;
    return NULL;
}

static TRITONSERVER_Error *check_config_version(uint32_t version) {
    if (version == 1) return NULL;
    return inferd_refuse(TRITONSERVER_ERROR_UNSUPPORTED, "model configuration version %u is not supported: expected 1",
                         version);
}

/* The caller deletes the message. */
TRITONSERVER_Error *TRITONBACKEND_ModelConfig(TRITONBACKEND_Model *model, uint32_t config_version,
                                              TRITONSERVER_Message **config) {
    TRITONSERVER_Error *error = check_config_version(config_version);
    if (error) return error;
    return TRITONSERVER_MessageNewFromSerializedJson(config, model->config->text, model->config->size);
}

TRITONSERVER_Error *TRITONBACKEND_ModelSetConfig(TRITONBACKEND_Model *model, uint32_t config_version,
                                                 TRITONSERVER_Message *config) {
    TRITONSERVER_Error *error = check_config_version(config_version);
    if (error) return error;
    TRITONSERVER_Message *copy = inferd_message(config->text, config->size);
    if (copy == NULL) return inferd_refuse(TRITONSERVER_ERROR_INTERNAL, "no memory for a configuration");
    TRITONSERVER_MessageDelete(model->config);
    model->config = copy;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelReportMemoryUsage(TRITONBACKEND_Model *model,
                                                         TRITONSERVER_BufferAttributes **usage, uint32_t count) {
    (void)model, (void)usage, (void)count; /* the server does not use it */
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Instances */

GETTER(TRITONBACKEND_ModelInstanceName, TRITONBACKEND_ModelInstance, const char *, object->name)
GETTER(TRITONBACKEND_ModelInstanceKind, TRITONBACKEND_ModelInstance, TRITONSERVER_InstanceGroupKind, object->kind)
GETTER(TRITONBACKEND_ModelInstanceDeviceId, TRITONBACKEND_ModelInstance, int32_t, object->device)
GETTER(TRITONBACKEND_ModelInstanceHostPolicy, TRITONBACKEND_ModelInstance, TRITONSERVER_Message *, object->host_policy)
GETTER(TRITONBACKEND_ModelInstanceModel, TRITONBACKEND_ModelInstance, TRITONBACKEND_Model *, object->model)
STATE(ModelInstance, TRITONBACKEND_ModelInstance)

#define CONSTANT(function, type, constant)                                          \
    TRITONSERVER_Error *function(TRITONBACKEND_ModelInstance *instance, type *value) { \
        (void)instance;                                                             \
        *value = constant;                                                          \
        return NULL;                                                                \
    }

CONSTANT(TRITONBACKEND_ModelInstanceIsPassive, bool, false)
CONSTANT(TRITONBACKEND_ModelInstanceProfileCount, uint32_t, 0)
CONSTANT(TRITONBACKEND_ModelInstanceSecondaryDeviceCount, uint32_t, 0)

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportMemoryUsage(TRITONBACKEND_ModelInstance *instance,
                                                                 TRITONSERVER_BufferAttributes **usage,
                                                                 uint32_t count) {
    (void)instance, (void)usage, (void)count;
    return NULL;
}

/* The server itself counts executions and measures their times, so these reports of a backend are dropped. */

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportStatistics(TRITONBACKEND_ModelInstance *instance,
                                                                TRITONBACKEND_Request *request, bool success,
                                                                uint64_t execution_start, uint64_t compute_start,
                                                                uint64_t compute_end, uint64_t execution_end) {
    (void)instance, (void)request, (void)success;
    (void)execution_start, (void)compute_start, (void)compute_end, (void)execution_end;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportBatchStatistics(TRITONBACKEND_ModelInstance *instance,
                                                                     uint64_t batch_size, uint64_t execution_start,
                                                                     uint64_t compute_start, uint64_t compute_end,
                                                                     uint64_t execution_end) {
    (void)instance, (void)batch_size;
    (void)execution_start, (void)compute_start, (void)compute_end, (void)execution_end;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceResponseStatisticsNew(
    TRITONBACKEND_ModelInstanceResponseStatistics **statistics) {
    *statistics = calloc(1, sizeof **statistics);
    if (*statistics == NULL) return inferd_refuse(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for statistics");
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceResponseStatisticsDelete(
    TRITONBACKEND_ModelInstanceResponseStatistics *statistics) {
    free(statistics);
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(
    TRITONBACKEND_ModelInstanceResponseStatistics *statistics, TRITONBACKEND_ModelInstance *instance) {
    (void)statistics, (void)instance; /* each instance has a process of its own */
    return NULL;
}

#define SETTER(function, type, member)                                                                          \
    TRITONSERVER_Error *TRITONBACKEND_ModelInstanceResponseStatisticsSet##function(                             \
        TRITONBACKEND_ModelInstanceResponseStatistics *statistics, type value) {                                \
        statistics->member = value;                                                                             \
        return NULL;                                                                                            \
    }

SETTER(ResponseFactory, TRITONBACKEND_ResponseFactory *, factory)
SETTER(ResponseStart, uint64_t, start)
SETTER(ComputeOutputStart, uint64_t, output)
SETTER(ResponseEnd, uint64_t, end)
SETTER(Error, TRITONSERVER_Error *, error)

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportResponseStatistics(
    TRITONBACKEND_ModelInstanceResponseStatistics *statistics) {
    enum { SUCCESS, FAIL, EMPTY, CANCEL } kind;
    if (statistics->factory == NULL)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "statistics of a response need a response factory");
    TRITONBACKEND_Request *request = statistics->factory->request;
    uint32_t index = atomic_fetch_add_explicit(&request->reported, 1, memory_order_relaxed);
    if (statistics->error == NULL)
        kind = statistics->output ? SUCCESS : EMPTY;
    else
        kind = TRITONSERVER_ErrorCode(statistics->error) == TRITONSERVER_ERROR_CANCELLED ? CANCEL : FAIL;
    uint64_t computed = kind != CANCEL && statistics->output ? statistics->output : statistics->end;
    if (statistics->start > computed)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "Response start cannot happen after %s",
                             computed == statistics->end ? "response end" : "compute output start");
    if (computed > statistics->end)
        return inferd_refuse(TRITONSERVER_ERROR_INVALID_ARG, "Compute output start cannot happen after response end");
    inferd_host.report(request->owner, kind, index, computed - statistics->start, statistics->end - computed);
    return NULL;
}
