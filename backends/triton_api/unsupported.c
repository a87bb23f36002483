/* The rest of the API. Each function returns an error that says that it is not supported, whatever its arguments are. So a
 * backend that may call such a function can be loaded, and gets the error only when it calls the function. */

#include "objects.h"

#define UNSUPPORTED(function)                                                                          \
    API TRITONSERVER_Error *function(void);                                                            \
    API TRITONSERVER_Error *function(void) {                                                           \
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, #function " is not served by inferd"); \
    }

/* The metrics of the server */
UNSUPPORTED(TRITONSERVER_MetricsDelete)
UNSUPPORTED(TRITONSERVER_MetricsFormatted)

/* Traces that a backend makes */
UNSUPPORTED(TRITONSERVER_InferenceTraceNew)
UNSUPPORTED(TRITONSERVER_InferenceTraceTensorNew)
UNSUPPORTED(TRITONSERVER_InferenceTraceDelete)
UNSUPPORTED(TRITONSERVER_InferenceTraceId)
UNSUPPORTED(TRITONSERVER_InferenceTraceParentId)
UNSUPPORTED(TRITONSERVER_InferenceTraceModelName)
UNSUPPORTED(TRITONSERVER_InferenceTraceModelVersion)
UNSUPPORTED(TRITONSERVER_InferenceTraceRequestId)
UNSUPPORTED(TRITONSERVER_InferenceTraceSpawnChildTrace)
UNSUPPORTED(TRITONSERVER_InferenceTraceSetContext)
UNSUPPORTED(TRITONSERVER_InferenceTraceContext)

/* Requests to other models */
UNSUPPORTED(TRITONSERVER_InferenceRequestAddRawInput)

/* Options of a server in the process */
UNSUPPORTED(TRITONSERVER_ServerOptionsNew)
UNSUPPORTED(TRITONSERVER_ServerOptionsDelete)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetServerId)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelRepositoryPath)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelControlMode)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetStartupModel)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetStrictModelConfig)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelConfigName)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetRateLimiterMode)
UNSUPPORTED(TRITONSERVER_ServerOptionsAddRateLimiterResource)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetCudaMemoryPoolByteSize)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetCudaVirtualAddressSize)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetResponseCacheByteSize)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetCacheConfig)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetCacheDirectory)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetMinSupportedComputeCapability)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetExitOnError)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetStrictReadiness)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetExitTimeout)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetBufferManagerThreadCount)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelLoadThreadCount)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelLoadRetryCount)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelNamespacing)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetEnablePeerAccess)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogFile)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogInfo)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogWarn)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogError)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogFormat)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetLogVerbose)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetMetrics)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetGpuMetrics)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetCpuMetrics)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetMetricsInterval)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetBackendDirectory)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetRepoAgentDirectory)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetModelLoadDeviceLimit)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetBackendConfig)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetHostPolicy)
UNSUPPORTED(TRITONSERVER_ServerOptionsSetMetricsConfig)

/* The server */
UNSUPPORTED(TRITONSERVER_ServerNew)
UNSUPPORTED(TRITONSERVER_ServerDelete)
UNSUPPORTED(TRITONSERVER_ServerStop)
UNSUPPORTED(TRITONSERVER_ServerSetExitTimeout)
UNSUPPORTED(TRITONSERVER_ServerRegisterModelRepository)
UNSUPPORTED(TRITONSERVER_ServerUnregisterModelRepository)
UNSUPPORTED(TRITONSERVER_ServerPollModelRepository)
UNSUPPORTED(TRITONSERVER_ServerIsReady)
UNSUPPORTED(TRITONSERVER_ServerModelBatchProperties)
UNSUPPORTED(TRITONSERVER_ServerMetadata)
UNSUPPORTED(TRITONSERVER_ServerModelMetadata)
UNSUPPORTED(TRITONSERVER_ServerModelStatistics)
UNSUPPORTED(TRITONSERVER_ServerModelConfig)
UNSUPPORTED(TRITONSERVER_ServerModelIndex)
UNSUPPORTED(TRITONSERVER_ServerMetrics)

/* Profiles, secondary devices, attributes of backends */
UNSUPPORTED(TRITONBACKEND_ModelInstanceProfileName)
UNSUPPORTED(TRITONBACKEND_ModelInstanceSecondaryDeviceProperties)
UNSUPPORTED(TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup)
UNSUPPORTED(TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading)
