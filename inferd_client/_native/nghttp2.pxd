# The part of libnghttp2 that a client needs.

from libc.stdint cimport int32_t, uint8_t, uint32_t

cdef extern from "nghttp2/nghttp2.h" nogil:
    ctypedef struct nghttp2_session:
        pass
    ctypedef struct nghttp2_session_callbacks:
        pass
    ctypedef struct nghttp2_nv:
        uint8_t *name
        uint8_t *value
        size_t namelen
        size_t valuelen
        uint8_t flags
    ctypedef struct nghttp2_frame_hd:
        size_t length
        int32_t stream_id
        uint8_t type
        uint8_t flags
    ctypedef union nghttp2_frame:
        nghttp2_frame_hd hd
    ctypedef union nghttp2_data_source:
        int fd
        void *ptr
    ctypedef ssize_t (*nghttp2_data_source_read_callback)(
        nghttp2_session *, int32_t, uint8_t *, size_t, uint32_t *, nghttp2_data_source *, void *) noexcept nogil
    ctypedef struct nghttp2_data_provider:
        nghttp2_data_source source
        nghttp2_data_source_read_callback read_callback
    ctypedef struct nghttp2_priority_spec:
        pass
    ctypedef struct nghttp2_option:
        pass
    ctypedef struct nghttp2_settings_entry:
        int32_t settings_id
        uint32_t value

    enum:
        NGHTTP2_DEFAULT_WEIGHT
        NGHTTP2_NO_ERROR
        NGHTTP2_CANCEL
        NGHTTP2_FLAG_NONE
        NGHTTP2_DATA
        NGHTTP2_SETTINGS
        NGHTTP2_GOAWAY
        NGHTTP2_PING
        NGHTTP2_FLAG_ACK
        NGHTTP2_FLAG_END_STREAM
        NGHTTP2_FLAG_PADDED
        NGHTTP2_REFUSED_STREAM
        NGHTTP2_ERR_WOULDBLOCK
        NGHTTP2_ERR_CALLBACK_FAILURE
        NGHTTP2_ERR_DEFERRED
        NGHTTP2_DATA_FLAG_EOF
        NGHTTP2_DATA_FLAG_NO_COPY
        NGHTTP2_NV_FLAG_NONE
        NGHTTP2_NV_FLAG_NO_INDEX
        NGHTTP2_NV_FLAG_NO_COPY_NAME
        NGHTTP2_NV_FLAG_NO_COPY_VALUE
        NGHTTP2_SETTINGS_ENABLE_PUSH
        NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
        NGHTTP2_SETTINGS_MAX_FRAME_SIZE

    int nghttp2_session_callbacks_new(nghttp2_session_callbacks **)
    void nghttp2_session_callbacks_del(nghttp2_session_callbacks *)
    void nghttp2_session_callbacks_set_on_header_callback(
        nghttp2_session_callbacks *,
        int (*)(nghttp2_session *, const nghttp2_frame *, const uint8_t *, size_t, const uint8_t *, size_t, uint8_t,
                void *) noexcept nogil)
    void nghttp2_session_callbacks_set_on_data_chunk_recv_callback(
        nghttp2_session_callbacks *,
        int (*)(nghttp2_session *, uint8_t, int32_t, const uint8_t *, size_t, void *) noexcept nogil)
    void nghttp2_session_callbacks_set_on_stream_close_callback(
        nghttp2_session_callbacks *, int (*)(nghttp2_session *, int32_t, uint32_t, void *) noexcept nogil)
    void nghttp2_session_callbacks_set_on_begin_frame_callback(
        nghttp2_session_callbacks *, int (*)(nghttp2_session *, const nghttp2_frame_hd *, void *) noexcept nogil)
    void nghttp2_session_callbacks_set_on_frame_recv_callback(
        nghttp2_session_callbacks *, int (*)(nghttp2_session *, const nghttp2_frame *, void *) noexcept nogil)
    void nghttp2_session_callbacks_set_send_data_callback(
        nghttp2_session_callbacks *,
        int (*)(nghttp2_session *, nghttp2_frame *, const uint8_t *, size_t, nghttp2_data_source *,
                void *) noexcept nogil)
    void nghttp2_session_callbacks_set_data_source_read_length_callback(
        nghttp2_session_callbacks *,
        ssize_t (*)(nghttp2_session *, uint8_t, int32_t, int32_t, int32_t, uint32_t, void *) noexcept nogil)
    int nghttp2_option_new(nghttp2_option **)
    void nghttp2_option_del(nghttp2_option *)
    void nghttp2_option_set_no_auto_window_update(nghttp2_option *, int)
    int nghttp2_session_client_new2(nghttp2_session **, const nghttp2_session_callbacks *, void *,
                                    const nghttp2_option *)
    int nghttp2_session_consume(nghttp2_session *, int32_t, size_t)
    int nghttp2_session_consume_connection(nghttp2_session *, size_t)
    int nghttp2_session_consume_stream(nghttp2_session *, int32_t, size_t)
    void nghttp2_session_del(nghttp2_session *)
    int nghttp2_session_set_local_window_size(nghttp2_session *, uint8_t, int32_t, int32_t)
    void *nghttp2_session_get_stream_user_data(nghttp2_session *, int32_t)
    ssize_t nghttp2_session_mem_recv(nghttp2_session *, const uint8_t *, size_t)
    ssize_t nghttp2_session_mem_send(nghttp2_session *, const uint8_t **)
    int nghttp2_session_set_stream_user_data(nghttp2_session *, int32_t, void *)
    int nghttp2_session_want_read(nghttp2_session *)
    int nghttp2_session_want_write(nghttp2_session *)
    int nghttp2_submit_settings(nghttp2_session *, uint8_t, const nghttp2_settings_entry *, size_t)
    void nghttp2_priority_spec_init(nghttp2_priority_spec *, int32_t, int32_t, int)
    int32_t nghttp2_submit_request(nghttp2_session *, const nghttp2_priority_spec *, const nghttp2_nv *, size_t,
                                   const nghttp2_data_provider *, void *)
    int nghttp2_session_resume_data(nghttp2_session *, int32_t)
    int nghttp2_submit_ping(nghttp2_session *, uint8_t, const uint8_t *)
    int nghttp2_submit_rst_stream(nghttp2_session *, uint8_t, int32_t, uint32_t)
    int nghttp2_session_terminate_session(nghttp2_session *, uint32_t)
    const char *NGHTTP2_VERSION
