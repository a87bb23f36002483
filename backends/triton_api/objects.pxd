"""Declarations of objects.h: the structures that the C sources of the API share with their host."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t

cdef extern from "<stdatomic.h>" nogil:
    ctypedef int atomic_int
    ctypedef bint atomic_bool


cdef extern from "<stdbool.h>" nogil:
    ctypedef bint c_bool "bool"


cdef extern from "backends/triton_api/objects.h" nogil:
    ctypedef int TRITONSERVER_DataType
    ctypedef int TRITONSERVER_Error_Code
    ctypedef int TRITONSERVER_InstanceGroupKind
    ctypedef int TRITONSERVER_LogLevel
    ctypedef int TRITONSERVER_MetricKind
    ctypedef int TRITONSERVER_ParameterType

    int MOST_DIMENSIONS, SENT_IN_RECORD
    int TRITONSERVER_TYPE_BYTES, TRITONSERVER_LOG_VERBOSE
    int TRITONSERVER_ERROR_INTERNAL, TRITONSERVER_ERROR_INVALID_ARG, TRITONSERVER_ERROR_UNAVAILABLE
    int TRITONSERVER_PARAMETER_STRING, TRITONSERVER_PARAMETER_INT, TRITONSERVER_PARAMETER_BOOL
    int TRITONSERVER_PARAMETER_DOUBLE
    uint32_t TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
    uint32_t TRITONSERVER_RESPONSE_COMPLETE_FINAL

    ctypedef struct TRITONSERVER_Error:
        TRITONSERVER_Error_Code code
        char *text

    ctypedef struct TRITONSERVER_Message:
        size_t size
        char *text

    ctypedef struct TRITONSERVER_Parameter:
        char *name
        TRITONSERVER_ParameterType type
        int64_t integer "plain.integer"
        c_bool flag "plain.flag"
        double number "plain.number"
        void *text
        uint64_t size
        TRITONSERVER_Parameter *next

    ctypedef struct TRITONSERVER_BufferAttributes:
        size_t byte_size

    ctypedef struct Tensor "struct Tensor":
        const char *name
        TRITONSERVER_DataType datatype
        uint32_t rank
        int64_t *shape
        void *base
        TRITONSERVER_BufferAttributes attributes
        c_bool updated
        c_bool shared
        c_bool granted
        Tensor *next

    ctypedef struct TRITONBACKEND_Input:
        Tensor tensor

    ctypedef struct Shared "struct Shared":
        void *base
        size_t size
        void *before

    c_bool inferd_resize(Shared *shared, size_t size) nogil

    ctypedef struct Grant "struct Grant":
        pass

    void inferd_open_grant(Grant *grant, uintptr_t at, uintptr_t end) nogil
    uintptr_t inferd_close_grant(Grant *grant) nogil
    c_bool inferd_uses_grant(Grant *grant) nogil

    ctypedef struct TRITONBACKEND_Request:
        atomic_int references
        atomic_bool released
        bint reschedulable
        void *owner
        const char *model
        const char *id
        const char *correlation_text
        uint64_t correlation_id
        uint64_t timeout
        uint32_t flags
        uint32_t input_count
        TRITONBACKEND_Input *inputs
        uint32_t output_count
        const char **outputs
        uint32_t parameter_count
        TRITONSERVER_Parameter *parameters
        const char **state_names
        Shared **shared
        Tensor *states
        Grant *grant
        c_bool sent

    ctypedef struct TRITONBACKEND_Response:
        Tensor *outputs
        TRITONSERVER_Parameter *parameters

    ctypedef struct Piece "struct Piece":
        const void *base
        size_t size

    ctypedef struct CallInput "struct CallInput":
        Tensor *tensor
        Piece *pieces
        uint32_t piece_count
        CallInput *next

    ctypedef struct Name "struct Name":
        Name *next
        char *text

    ctypedef struct TRITONSERVER_InferenceResponse:
        TRITONSERVER_Error *error

    ctypedef struct TRITONSERVER_InferenceRequest:
        const char *model
        int64_t version
        const char *id
        const char *correlation_text
        uint64_t correlation_id
        uint64_t priority
        uint64_t timeout
        uint32_t flags
        c_bool cancelled
        CallInput *inputs
        Name *outputs
        TRITONSERVER_Parameter *parameters
        void (*respond)(TRITONSERVER_InferenceResponse *, uint32_t, void *) noexcept nogil
        void *respond_data
        void (*release)(TRITONSERVER_InferenceRequest *, uint32_t, void *) noexcept nogil
        void *release_data
        void *call

    ctypedef struct TRITONBACKEND_Backend:
        const char *name
        const char *folder
        TRITONSERVER_Message *config

    ctypedef struct TRITONBACKEND_Model:
        TRITONBACKEND_Backend *backend
        const char *name
        const char *folder
        uint64_t version
        TRITONSERVER_Message *config
        c_bool completes

    ctypedef struct TRITONBACKEND_ModelInstance:
        TRITONBACKEND_Model *model
        const char *name
        TRITONSERVER_InstanceGroupKind kind
        int32_t device
        TRITONSERVER_Message *host_policy

    ctypedef struct TRITONSERVER_MetricFamily:
        pass

    ctypedef struct TRITONSERVER_Metric:
        pass

    ctypedef struct TRITONSERVER_MetricArgs:
        uint64_t count
        double *buckets

    ctypedef struct CHost "struct Host":
        void (*log)(TRITONSERVER_LogLevel, const char *, int, const char *) noexcept
        c_bool (*logs)(TRITONSERVER_LogLevel) noexcept
        c_bool (*is_cancelled)(void *) noexcept
        void (*released)(void *, uint32_t) noexcept
        TRITONSERVER_Error *(*send)(void *, TRITONBACKEND_Response *, uint32_t, TRITONSERVER_Error *) noexcept
        void (*report)(void *, int, uint32_t, uint64_t, uint64_t) noexcept
        void (*forget)(void *) noexcept
        TRITONSERVER_Error *(*new_family)(
            TRITONSERVER_MetricFamily **, TRITONSERVER_MetricKind, const char *, const char *) noexcept
        TRITONSERVER_Error *(*new_metric)(
            TRITONSERVER_Metric **, TRITONSERVER_MetricFamily *, const TRITONSERVER_Parameter **, uint64_t,
            const TRITONSERVER_MetricArgs *) noexcept
        TRITONSERVER_Error *(*measure)(TRITONSERVER_Metric *, const char *, double *) noexcept
        TRITONSERVER_Error *(*kind_of)(void *, TRITONSERVER_MetricKind *) noexcept
        void (*let_go)(void *) noexcept
        TRITONSERVER_Error *(*call)(TRITONSERVER_InferenceRequest *) noexcept
        void (*cancel)(TRITONSERVER_InferenceRequest *) noexcept
        TRITONSERVER_Error *(*is_ready)(const char *, int64_t, c_bool *) noexcept
        TRITONSERVER_Error *(*is_decoupled)(const char *, int64_t, c_bool *) noexcept
        TRITONSERVER_Error *(*load_model)(const char *, const TRITONSERVER_Parameter **, uint64_t) noexcept
        TRITONSERVER_Error *(*unload_model)(const char *, c_bool) noexcept

    CHost inferd_host
    TRITONSERVER_Message *inferd_message(const char *text, size_t size)
    void inferd_free_tensors(Tensor *first)
    void inferd_drop(TRITONBACKEND_Request *request)
    uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType datatype)
    TRITONSERVER_Error *TRITONSERVER_ErrorNew(int code, const char *text)
    void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error)
    TRITONSERVER_InferenceResponse *inferd_new_response(const TRITONSERVER_InferenceRequest *request)
    TRITONSERVER_Error *inferd_start_response(TRITONSERVER_InferenceResponse *response)
    TRITONSERVER_Error *inferd_add_output(
        TRITONSERVER_InferenceResponse *response, const char *name, TRITONSERVER_DataType datatype,
        const int64_t *shape, uint32_t rank, const void *data, size_t size)
    TRITONSERVER_Error *inferd_add_parameter(
        TRITONSERVER_InferenceResponse *response, const char *name, TRITONSERVER_ParameterType type,
        const void *value)
