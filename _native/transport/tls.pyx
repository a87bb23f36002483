"""TLS by OpenSSL: contexts with a certificate, and what the server learns of a client in its handshake."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen

from inferd._native.atomic cimport fetch_add64, load64
from inferd._native.text cimport format_text
from inferd._native.transport.outgoing cimport Output, output_clear, output_close, output_copy, output_drop

import ipaddress

from inferd._native.memory.resource import add_counter

cdef extern from *:
    """
    #include <openssl/err.h>
    #include <openssl/ssl.h>
    #include <openssl/x509v3.h>
    #if OPENSSL_VERSION_NUMBER < 0x30000000L
    #error "OpenSSL 3 is needed"
    #endif
    static int inferd_choose_alpn(SSL *ssl, const unsigned char **out, unsigned char *size, const unsigned char *in,
                                  unsigned int in_size, void *context) {
        static const unsigned char h2[] = {2, 'h', '2'};
        return SSL_select_next_proto((unsigned char **)out, size, h2, sizeof(h2), in, in_size) == OPENSSL_NPN_NEGOTIATED
            ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
    }
    static int inferd_no_passphrase(char *out, int size, int writing, void *asked) {
        *(int *)asked = 1;
        return -1;
    }
    /* Ciphers are those that RFC 9113 allows, the cheapest first. An idle connection keeps no buffers. */
    static SSL_CTX *inferd_context(void) {
        SSL_CTX *context = SSL_CTX_new(TLS_server_method());
        if (context == NULL) return NULL;
        SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
        SSL_CTX_set_ciphersuites(context,
            "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
        SSL_CTX_set_cipher_list(context, "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
                                         "ECDHE+AESGCM:ECDHE+CHACHA20");
        SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE |
                            SSL_OP_PRIORITIZE_CHACHA | SSL_OP_IGNORE_UNEXPECTED_EOF);
        SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
        SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_alpn_select_cb(context, inferd_choose_alpn, NULL);
        return context;
    }
    static int inferd_use_pair(SSL_CTX *context, BIO *chain, BIO *key, int *locked) {
        X509 *certificate = PEM_read_bio_X509_AUX(chain, NULL, NULL, NULL);
        int fits = certificate != NULL && SSL_CTX_use_certificate(context, certificate);
        X509_free(certificate);
        while (fits && (certificate = PEM_read_bio_X509(chain, NULL, NULL, NULL)) != NULL)
            fits = SSL_CTX_add0_chain_cert(context, certificate);
        if (!fits) return 0;
        if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) return 0;
        ERR_clear_error();
        EVP_PKEY *private_key = PEM_read_bio_PrivateKey(key, NULL, inferd_no_passphrase, locked);
        fits = private_key != NULL && SSL_CTX_use_PrivateKey(context, private_key);
        EVP_PKEY_free(private_key);
        return fits;
    }
    /* Every client must show a certificate of one of these roots. A resumed session would escape this check. */
    static int inferd_demand(SSL_CTX *context, BIO *roots) {
        X509 *root;
        int count = 0, good = 1;
        while (good && (root = PEM_read_bio_X509(roots, NULL, NULL, NULL)) != NULL) {
            good = X509_STORE_add_cert(SSL_CTX_get_cert_store(context), root) && SSL_CTX_add_client_CA(context, root);
            X509_free(root);
            count++;
        }
        if (!good || count == 0 || ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) return 0;
        ERR_clear_error();
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
        SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
        return SSL_CTX_set_num_tickets(context, 0);
    }
    static const char *inferd_ssl_reason(void) {  /* of the first error; NULL: there is none */
        unsigned long code = ERR_get_error();
        const char *reason = code ? ERR_reason_error_string(code) : NULL;
        ERR_clear_error();
        return reason;
    }
    /* Why a handshake has failed; NULL: the peer is gone. */
    static const char *inferd_handshake_reason(SSL *ssl) {
        long verified = SSL_get_verify_result(ssl);
        const char *reason = inferd_ssl_reason();
        if (reason == NULL) return NULL;
        return verified != X509_V_OK ? X509_verify_cert_error_string(verified) : reason;
    }
    static int inferd_name_at(X509_NAME *names, int at, const char **key, unsigned char **value) {
        X509_NAME_ENTRY *entry = X509_NAME_get_entry(names, at);
        *key = OBJ_nid2ln(OBJ_obj2nid(X509_NAME_ENTRY_get_object(entry)));
        return ASN1_STRING_to_UTF8(value, X509_NAME_ENTRY_get_data(entry));
    }
    typedef struct { int type; const unsigned char *data; int size; X509_NAME *names; } inferd_alternative;
    static GENERAL_NAMES *inferd_alternatives(X509 *certificate) {
        return X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    }
    static int inferd_alternative_count(GENERAL_NAMES *names) { return names ? sk_GENERAL_NAME_num(names) : 0; }
    static inferd_alternative inferd_alternative_at(GENERAL_NAMES *names, int at) {
        GENERAL_NAME *name = sk_GENERAL_NAME_value(names, at);
        inferd_alternative out = {.type = name->type};
        if (name->type == GEN_DIRNAME) {
            out.names = name->d.directoryName;
        } else if (name->type == GEN_EMAIL || name->type == GEN_DNS || name->type == GEN_URI ||
                   name->type == GEN_IPADD) {
            out.data = ASN1_STRING_get0_data(name->d.ia5);
            out.size = ASN1_STRING_length(name->d.ia5);
        }
        return out;
    }
    static int inferd_object_text(GENERAL_NAMES *names, int at, char *out, int size) {
        return OBJ_obj2txt(out, size, sk_GENERAL_NAME_value(names, at)->d.registeredID, 1);
    }
    """
    ctypedef struct BIO
    ctypedef struct BIO_METHOD
    ctypedef struct X509
    ctypedef struct X509_NAME
    ctypedef struct GENERAL_NAMES
    ctypedef struct Alternative "inferd_alternative":
        int type
        const unsigned char *data
        int size
        X509_NAME *names
    enum:
        SSL_ERROR_WANT_READ
        SSL_ERROR_WANT_WRITE
        BIO_CTRL_FLUSH
        BIO_TYPE_SOURCE_SINK
        SSL3_RT_HANDSHAKE
        GEN_EMAIL
        GEN_DNS
        GEN_URI
        GEN_IPADD
        GEN_DIRNAME
        GEN_RID
    SSL_CTX *new_context "inferd_context"() nogil
    bint use_pair "inferd_use_pair"(SSL_CTX *context, BIO *chain, BIO *key, int *locked) nogil
    bint demand "inferd_demand"(SSL_CTX *context, BIO *roots) nogil
    const char *ssl_reason "inferd_ssl_reason"() nogil
    const char *handshake_reason "inferd_handshake_reason"(SSL *ssl) nogil
    int name_at "inferd_name_at"(X509_NAME *names, int at, const char **key, unsigned char **value)
    GENERAL_NAMES *alternatives_of "inferd_alternatives"(X509 *certificate)
    int alternative_count "inferd_alternative_count"(GENERAL_NAMES *names)
    Alternative alternative_at "inferd_alternative_at"(GENERAL_NAMES *names, int at)
    int object_text "inferd_object_text"(GENERAL_NAMES *names, int at, char *out, int size)
    void GENERAL_NAMES_free(GENERAL_NAMES *names)
    void OPENSSL_free(void *memory)
    void ERR_clear_error() nogil
    void SSL_CTX_free(SSL_CTX *context)
    SSL *SSL_new(SSL_CTX *context)
    void SSL_free(SSL *ssl) nogil
    int SSL_set_fd(SSL *ssl, int fd)
    int SSL_accept(SSL *ssl) nogil
    int SSL_read(SSL *ssl, void *out, int size) nogil
    int SSL_write(SSL *ssl, const void *data, int size) nogil
    int SSL_shutdown(SSL *ssl) nogil
    int SSL_get_error(const SSL *ssl, int result) nogil
    ctypedef void (*Message)(int, int, int, const void *, size_t, SSL *, void *) noexcept nogil
    void SSL_set_msg_callback(SSL *ssl, Message function) nogil
    void SSL_set_msg_callback_arg(SSL *ssl, void *argument) nogil
    void SSL_set_bio(SSL *ssl, BIO *reads, BIO *writes) nogil
    void SSL_get0_alpn_selected(const SSL *ssl, const unsigned char **data, unsigned int *size)
    X509 *SSL_get0_peer_certificate(const SSL *ssl)
    X509_NAME *X509_get_subject_name(const X509 *certificate)
    int X509_NAME_entry_count(const X509_NAME *names)
    int i2d_X509(X509 *certificate, unsigned char **out)
    BIO *BIO_new(const BIO_METHOD *method) nogil
    BIO *BIO_new_mem_buf(const void *data, int size)
    int BIO_free(BIO *bio)
    void BIO_set_data(BIO *bio, void *data) nogil
    void *BIO_get_data(BIO *bio) nogil
    void BIO_set_init(BIO *bio, int init) nogil
    void BIO_set_retry_read(BIO *bio) nogil
    void BIO_clear_retry_flags(BIO *bio) nogil
    int BIO_get_new_index()
    BIO_METHOD *BIO_meth_new(int type, const char *name)
    int BIO_meth_set_read(BIO_METHOD *method, int (*function)(BIO *bio, char *out, int size) noexcept nogil)
    int BIO_meth_set_write(BIO_METHOD *method, int (*function)(BIO *bio, const char *data, int size) noexcept nogil)
    int BIO_meth_set_destroy(BIO_METHOD *method, int (*function)(BIO *bio) noexcept nogil)
    int BIO_meth_set_ctrl(
        BIO_METHOD *method, long (*function)(BIO *bio, int what, long number, void *more) noexcept nogil)

cdef enum:
    RECORD = 16 << 10        # bytes of a full record
    KEY_UPDATES = 32         # of a peer; and one more for each MiB that it sends

cdef extern from *:
    """
    static __thread unsigned char inferd_record[16 << 10];
    """
    uint8_t *gathered "inferd_record"  # small pieces of output that become one record

cdef dict ALTERNATIVES = {
    GEN_EMAIL: "email", GEN_DNS: "DNS", GEN_URI: "URI", GEN_IPADD: "IP Address", GEN_DIRNAME: "DirName",
    GEN_RID: "Registered ID",
}


# ---------------------------------------------------------------------------------------------------------------------
# OpenSSL's side of the socket

cdef int give_received(BIO *bio, char *out, int size) noexcept nogil:
    cdef Tls *tls = <Tls *>BIO_get_data(bio)
    cdef size_t taken = min(tls.left, <size_t>size)
    BIO_clear_retry_flags(bio)
    if tls.key_updates > KEY_UPDATES + (tls.fed >> 20):
        return -1  # a record with a KeyUpdate costs 20 us, however small it is: end such a session
    if taken == 0:
        BIO_set_retry_read(bio)
        return -1
    memcpy(out, tls.received, taken)
    tls.received += taken
    tls.left -= taken
    return <int>taken


cdef void count_message(
    int write, int version, int kind, const void *data, size_t size, SSL *ssl, void *owner
) noexcept nogil:
    cdef Tls *tls = <Tls *>owner
    if not write and kind == SSL3_RT_HANDSHAKE:
        tls.key_updates += 1  # after the handshake OpenSSL accepts no other message of this kind


cdef int take_encrypted(BIO *bio, const char *data, int size) noexcept nogil:
    # records fill the blocks of the output without a gap
    cdef Tls *tls = <Tls *>BIO_get_data(bio)
    cdef Output *output = &tls.encrypted
    cdef size_t left = <size_t>size
    cdef size_t part
    BIO_clear_retry_flags(bio)
    while left:
        part = output.scratch.size - output.used if output.scratch != NULL else 0
        part = min(left, part if part else <size_t>RECORD)
        if not output_copy(output, <const uint8_t *>data, part):
            return -1
        data += part
        left -= part
    return size


cdef long control(BIO *bio, int what, long number, void *more) noexcept nogil:
    return what == BIO_CTRL_FLUSH


cdef int64_t alive = 0       # sessions whose handshake is over


cdef int let_go(BIO *bio) noexcept nogil:
    fetch_add64(&alive, -1)
    return 1


def _alive() -> int:
    return load64(&alive)


add_counter("tls", _alive)

cdef BIO_METHOD *MEMORY = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, b"inferd")
BIO_meth_set_read(MEMORY, give_received)
BIO_meth_set_write(MEMORY, take_encrypted)
BIO_meth_set_ctrl(MEMORY, control)
BIO_meth_set_destroy(MEMORY, let_go)


# ---------------------------------------------------------------------------------------------------------------------
# The handshake, and the bytes behind it

cdef Handshaken tls_accept(Tls *tls, char **why) noexcept nogil:
    cdef int result, error
    cdef const char *reason
    why[0] = NULL
    ERR_clear_error()
    result = SSL_accept(tls.ssl)
    if result == 1:
        return SHAKES_DONE if leave_socket(tls) else SHAKES_FAILED
    error = SSL_get_error(tls.ssl, result)
    if error == SSL_ERROR_WANT_READ:
        return SHAKES_READ
    if error == SSL_ERROR_WANT_WRITE:
        return SHAKES_WRITE
    reason = handshake_reason(tls.ssl)
    if reason != NULL:
        why[0] = format_text("%s", reason)
    return SHAKES_FAILED


cdef bint leave_socket(Tls *tls) noexcept nogil:
    # during the handshake OpenSSL reads whole records, and nothing beyond: no byte is lost
    cdef BIO *bio = BIO_new(MEMORY)
    if bio == NULL:
        return False
    BIO_set_data(bio, tls)
    BIO_set_init(bio, 1)
    fetch_add64(&alive, 1)
    SSL_set_msg_callback(tls.ssl, count_message)
    SSL_set_msg_callback_arg(tls.ssl, tls)
    SSL_set_bio(tls.ssl, bio, bio)  # owned once, though it serves both directions
    return True


cdef void tls_feed(Tls *tls, const uint8_t *data, size_t size) noexcept nogil:
    tls.received = data
    tls.left = size
    tls.fed += size


cdef Py_ssize_t tls_read(Tls *tls, uint8_t *out, size_t size) noexcept nogil:
    cdef int result
    ERR_clear_error()
    result = SSL_read(tls.ssl, out, <int>min(size, <size_t>1 << 30))
    if result > 0:
        return result
    return 0 if SSL_get_error(tls.ssl, result) == SSL_ERROR_WANT_READ else -1


cdef bint tls_write(Tls *tls, Output *output) noexcept nogil:
    cdef size_t encrypted = 0
    cdef size_t size
    cdef const uint8_t *data
    if not output_close(output):
        return False
    while output.count and encrypted < RECORDS:
        if output.pieces[0].size >= RECORD:
            data = output.pieces[0].data
            size = min(output.pieces[0].size // RECORD * RECORD, <size_t>RECORDS)
        else:
            data = gathered
            size = gather(output)
        ERR_clear_error()
        if SSL_write(tls.ssl, data, <int>size) <= 0:
            return False
        output_drop(output, size)
        encrypted += size
    if output.count == 0:
        output_clear(output)
    return True


cdef size_t gather(const Output *output) noexcept nogil:
    # the first bytes of the output, as many as a record has
    cdef size_t size = 0
    cdef size_t part
    cdef uint32_t i = 0
    while i < output.count and size < RECORD:
        part = min(output.pieces[i].size, RECORD - size)
        memcpy(gathered + size, output.pieces[i].data, part)
        size += part
        i += 1
    return size


cdef bint tls_finish(Tls *tls, Output *output) noexcept nogil:
    while output.size:
        if not tls_write(tls, output):
            return False
    output_clear(output)
    SSL_shutdown(tls.ssl)
    output[0] = tls.encrypted
    memset(&tls.encrypted, 0, sizeof(Output))
    return True


cdef void tls_free(Tls *tls) noexcept nogil:
    if tls == NULL:
        return
    SSL_free(tls.ssl)
    output_clear(&tls.encrypted)
    free(tls)


# ---------------------------------------------------------------------------------------------------------------------
# For Python

class TlsError(Exception):
    """A certificate, its key or the roots cannot be used. `reason` is OpenSSL's; None if it gives none."""

    def __init__(self, part: str, reason: str | None, locked: bool = False) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason
        self.locked = locked


cdef class TlsContext:
    """The server's side of TLS 1.2 and 1.3, with ALPN 'h2'.

    A client may resume a session of the same context, unless clients must show certificates.

    Args:
        certificate: the chain, PEM.
        key: the private key, PEM, without a passphrase.
        root: PEM certificates of which one must have signed a client's; None: clients need none.

    Raises:
        TlsError: one of them cannot be used. `part` is "pair" or "root"; `locked` says that the key has a passphrase.
    """

    def __cinit__(self, bytes certificate not None, bytes key not None, bytes root=None):
        cdef BIO *chain = BIO_new_mem_buf(<const char *>certificate, <int>len(certificate))
        cdef BIO *secret = BIO_new_mem_buf(<const char *>key, <int>len(key))
        cdef BIO *roots = BIO_new_mem_buf(<const char *>root, <int>len(root)) if root is not None else NULL
        cdef int locked = 0
        try:
            ERR_clear_error()
            self.context = new_context()
            if self.context == NULL or chain == NULL or secret == NULL or (root is not None and roots == NULL):
                raise MemoryError("no memory for TLS")
            if not use_pair(self.context, chain, secret, &locked):
                raise TlsError("pair", reason_text(), bool(locked))
            if roots != NULL and not demand(self.context, roots):
                raise TlsError("root", reason_text())
        finally:
            BIO_free(chain)
            BIO_free(secret)
            BIO_free(roots)

    def __dealloc__(self):
        SSL_CTX_free(self.context)


cdef object reason_text():
    cdef const char *reason = ssl_reason()
    return None if reason == NULL else reason.decode()


cdef class TlsSession:
    """TLS of one accepted socket: its handshake is `inferd._native.transport.handshake.Handshake`'s.

    Args:
        context: of the listener.
        fd: the socket, which does not block; the owner keeps it open as long as this object has it.
    """

    def __init__(self, TlsContext context not None, fd: int):
        self.context = context
        self.tls = <Tls *>calloc(1, sizeof(Tls))
        if self.tls == NULL:
            raise MemoryError("no memory for TLS")
        self.tls.ssl = SSL_new(context.context)
        if self.tls.ssl == NULL or not SSL_set_fd(self.tls.ssl, fd):
            raise MemoryError("no memory for TLS")

    def __dealloc__(self):
        tls_free(self.tls)

    @property
    def alpn(self) -> str:
        """The protocol that client and server agreed on; "": none."""
        cdef const unsigned char *data = NULL
        cdef unsigned int size = 0
        SSL_get0_alpn_selected(self.tls.ssl, &data, &size)
        return data[:size].decode("ascii", "replace")

    def certificate(self) -> bytes | None:
        """The client's certificate, DER; None if it has shown none."""
        cdef X509 *found = SSL_get0_peer_certificate(self.tls.ssl)
        cdef unsigned char *out
        cdef bytes der
        if found == NULL:
            return None
        der = PyBytes_FromStringAndSize(NULL, i2d_X509(found, NULL))
        out = <unsigned char *><char *>der
        i2d_X509(found, &out)
        return der

    def subject(self) -> list[tuple[str, str]]:
        """The names of the certificate's owner in its order, by the keys' long names, as "commonName"."""
        cdef X509 *found = SSL_get0_peer_certificate(self.tls.ssl)
        return [] if found == NULL else names_of(X509_get_subject_name(found))

    def alternative_names(self) -> list[tuple[str, str | None]]:
        """The certificate's alternative names with their types: DNS, URI, email, IP Address, DirName, Registered ID,
        othername. None for a name that cannot be read."""
        cdef X509 *found = SSL_get0_peer_certificate(self.tls.ssl)
        cdef GENERAL_NAMES *names
        if found == NULL:
            return []
        names = alternatives_of(found)
        try:
            return [alternative_name(names, at) for at in range(alternative_count(names))]
        finally:
            GENERAL_NAMES_free(names)


cdef list names_of(X509_NAME *names):
    cdef list out = []
    cdef const char *key
    cdef unsigned char *value
    cdef int size, at
    for at in range(X509_NAME_entry_count(names)):
        value = NULL
        size = name_at(names, at, &key, &value)
        if size >= 0:
            out.append((key.decode(), value[:size].decode("utf-8", "replace")))
            OPENSSL_free(value)
    return out


cdef tuple alternative_name(GENERAL_NAMES *names, int at):
    cdef Alternative name = alternative_at(names, at)
    cdef char text[256]
    cdef str kind = ALTERNATIVES.get(name.type, "othername")
    if name.names != NULL:
        return kind, ",".join(f"{key}={value}" for key, value in names_of(name.names))
    if name.type == GEN_RID:
        return kind, text[:strlen(text)].decode() if object_text(names, at, text, sizeof(text)) > 0 else None
    if name.data == NULL:
        return kind, None
    if name.type != GEN_IPADD:
        return kind, name.data[:name.size].decode("utf-8", "replace")
    return kind, str(ipaddress.ip_address(<bytes>name.data[:name.size])) if name.size in (4, 16) else None
