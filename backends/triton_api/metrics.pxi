"""Metrics that the backend makes. A part of _host.pyx."""

cdef TRITONSERVER_Error *host_new_family(
    TRITONSERVER_MetricFamily **family, TRITONSERVER_MetricKind kind, const char *name, const char *description
) noexcept with gil:
    kinds = (pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM)
    try:
        made = pb_utils.MetricFamily(text_of(name), text_of(description), kinds[kind])
    except Exception as raised:
        return refusal(raised)
    Py_INCREF(made)
    family[0] = <TRITONSERVER_MetricFamily *><void *>made
    return NULL


cdef TRITONSERVER_Error *host_new_metric(
    TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family, const TRITONSERVER_Parameter **labels,
    uint64_t count, const TRITONSERVER_MetricArgs *arguments
) noexcept with gil:
    try:
        named = {}
        for at in range(count):
            if labels[at].type != TRITONSERVER_PARAMETER_STRING or labels[at].text == NULL:
                raise pb_utils.TritonModelException(f"the label '{text_of(labels[at].name)}' of a metric is no string")
            named[text_of(labels[at].name)] = text_of(<const char *>labels[at].text)
        buckets = None
        if arguments != NULL:
            buckets = [arguments.buckets[at] for at in range(arguments.count)]
        made = (<object><void *>family).Metric(named, buckets)
    except Exception as raised:
        return refusal(raised)
    Py_INCREF(made)
    metric[0] = <TRITONSERVER_Metric *><void *>made
    return NULL


cdef TRITONSERVER_Error *host_measure(TRITONSERVER_Metric *metric, const char *what, double *value) noexcept with gil:
    measured = <object><void *>metric
    name = text_of(what)
    try:
        if name == "value":
            value[0] = measured.value()
        else:
            getattr(measured, name)(value[0])
    except Exception as raised:
        return refusal(raised)
    return NULL


cdef TRITONSERVER_Error *host_kind_of(void *measured, TRITONSERVER_MetricKind *kind) noexcept with gil:
    found = <object>measured
    kind[0] = getattr(found, "_family", found)._kind
    return NULL


cdef void host_let_go(void *measured) noexcept with gil:
    if measured != NULL:
        Py_DECREF(<object>measured)


inferd_host.new_family = host_new_family
inferd_host.new_metric = host_new_metric
inferd_host.measure = host_measure
inferd_host.kind_of = host_kind_of
inferd_host.let_go = host_let_go
