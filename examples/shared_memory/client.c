/* A client in C that shares its memory with the server: tensors are written and read where they are, nothing is sent.
 *
 *     cc -O2 -Wall -o client client.c -lnghttp2
 *     ./client /tmp/inferd.sock [BYTES [COUNT]]
 *
 * It asks the model `echo` with a tensor in a region of shared memory and the response in the same region, then with the
 * same tensor on the wire, and prints what a request took.
 *
 * gRPC is HTTP/2 with a prefix of five bytes before each message, and libnghttp2 speaks HTTP/2; the few protobuf
 * fields are written by hand. A program that has a gRPC library already sets the same parameters with it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <nghttp2/nghttp2.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* ---- bytes, and protobuf ---- */

typedef struct {
    uint8_t *data;
    size_t size, room;
} Bytes;

static void put(Bytes *out, const void *data, size_t size) {
    if (out->size + size > out->room) {
        out->room = 2 * (out->size + size);
        out->data = realloc(out->data, out->room);
        if (!out->data) die("no memory");
    }
    memcpy(out->data + out->size, data, size);
    out->size += size;
}

static void put_varint(Bytes *out, uint64_t value) {
    do {
        uint8_t byte = (value & 0x7f) | (value > 0x7f ? 0x80 : 0);
        put(out, &byte, 1);
        value >>= 7;
    } while (value);
}

static void put_number(Bytes *out, int field, uint64_t value) {
    put_varint(out, (uint64_t)field << 3);
    put_varint(out, value);
}

static void put_bytes(Bytes *out, int field, const void *data, size_t size) {
    put_varint(out, (uint64_t)field << 3 | 2);
    put_varint(out, size);
    put(out, data, size);
}

static void put_text(Bytes *out, int field, const char *text) { put_bytes(out, field, text, strlen(text)); }

/* a message as a field of another one; it is empty afterwards */
static void put_message(Bytes *out, int field, Bytes *message) {
    put_bytes(out, field, message->data, message->size);
    message->size = 0;
}

/* one entry of a map<string, InferParameter> */
static void put_parameter(Bytes *tensor, int field, const char *key, const char *text, uint64_t number) {
    Bytes entry = {0}, value = {0};
    if (text) put_text(&value, 3, text);     /* string_param */
    else put_number(&value, 2, number);      /* int64_param */
    put_text(&entry, 1, key);
    put_message(&entry, 2, &value);
    put_message(tensor, field, &entry);
    free(entry.data);
    free(value.data);
}

static void put_place(Bytes *tensor, int field, const char *region, uint64_t offset, uint64_t size) {
    put_parameter(tensor, field, "shared_memory_region", region, 0);
    put_parameter(tensor, field, "shared_memory_offset", NULL, offset);
    put_parameter(tensor, field, "shared_memory_byte_size", NULL, size);
}

/* ---- gRPC over a unix socket ---- */

typedef struct {
    int socket;
    nghttp2_session *session;
    const uint8_t *request;          /* of the call that runs, with its prefix */
    size_t left;
    Bytes response;
    int closed, status;
    char message[512];
} Connection;

static ssize_t write_socket(nghttp2_session *session, const uint8_t *data, size_t size, int flags, void *user) {
    (void)session, (void)flags;
    ssize_t written = send(((Connection *)user)->socket, data, size, MSG_NOSIGNAL);
    return written < 0 ? NGHTTP2_ERR_CALLBACK_FAILURE : written;
}

static ssize_t read_request(nghttp2_session *session, int32_t stream, uint8_t *out, size_t size, uint32_t *flags,
                            nghttp2_data_source *source, void *user) {
    Connection *connection = user;
    (void)session, (void)stream, (void)source;
    if (size > connection->left) size = connection->left;
    memcpy(out, connection->request, size);
    connection->request += size;
    connection->left -= size;
    if (!connection->left) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return (ssize_t)size;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
                   void *user) {
    (void)session, (void)flags, (void)stream;
    put(&((Connection *)user)->response, data, size);
    return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
                     const uint8_t *value, size_t size, uint8_t flags, void *user) {
    Connection *connection = user;
    (void)session, (void)frame, (void)flags;
    if (name_size == 11 && !memcmp(name, "grpc-status", 11)) connection->status = atoi((const char *)value);
    if (name_size == 12 && !memcmp(name, "grpc-message", 12))
        snprintf(connection->message, sizeof connection->message, "%.*s", (int)size, (const char *)value);
    return 0;
}

static int on_closed(nghttp2_session *session, int32_t stream, uint32_t error, void *user) {
    (void)session, (void)stream, (void)error;
    ((Connection *)user)->closed = 1;
    return 0;
}

static Connection *connect_to(const char *path) {
    Connection *connection = calloc(1, sizeof *connection);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    nghttp2_session_callbacks *callbacks;
    nghttp2_settings_entry window = {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 1 << 30};
    if (!connection || strlen(path) >= sizeof address.sun_path) die("%s: too long", path);
    strcpy(address.sun_path, path);
    connection->socket = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(connection->socket, (struct sockaddr *)&address, sizeof address) != 0)
        die("%s: %s", path, strerror(errno));
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_send_callback(callbacks, write_socket);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_closed);
    nghttp2_session_client_new(&connection->session, callbacks, connection);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_submit_settings(connection->session, NGHTTP2_FLAG_NONE, &window, 1);
    nghttp2_session_set_local_window_size(connection->session, NGHTTP2_FLAG_NONE, 0, 1 << 30);
    return connection;
}

#define HEADER(name, value) {(uint8_t *)name, (uint8_t *)value, sizeof(name) - 1, strlen(value), NGHTTP2_NV_FLAG_NONE}

/* One unary call; the message is written behind five bytes for its prefix. The response, with its prefix, is in
 * connection->response until the next call. */
static void call(Connection *connection, const char *method, Bytes *message, const char *lifetime) {
    char path[128];
    uint8_t received[1 << 16];
    uint32_t size = (uint32_t)(message->size - 5);
    nghttp2_data_provider body = {.read_callback = read_request};
    snprintf(path, sizeof path, "/inference.GRPCInferenceService/%s", method);
    const nghttp2_nv headers[] = {
        HEADER(":method", "POST"), HEADER(":scheme", "http"), HEADER(":path", path), HEADER(":authority", "localhost"),
        HEADER("content-type", "application/grpc"), HEADER("te", "trailers"), HEADER("inferd-shm-lifetime", lifetime)};
    message->data[0] = 0;            /* not compressed */
    for (int i = 0; i < 4; i++) message->data[1 + i] = (uint8_t)(size >> (24 - 8 * i));
    connection->request = message->data;
    connection->left = message->size;
    connection->response.size = 0;
    connection->closed = 0;
    connection->status = -1;
    connection->message[0] = 0;
    nghttp2_submit_request(connection->session, NULL, headers, sizeof headers / sizeof *headers, &body, NULL);
    while (!connection->closed) {
        if (nghttp2_session_send(connection->session) != 0) die("%s: the connection broke", method);
        if (connection->closed) break;
        ssize_t count = recv(connection->socket, received, sizeof received, 0);
        if (count <= 0 || nghttp2_session_mem_recv(connection->session, received, (size_t)count) < 0)
            die("%s: the connection broke", method);
    }
    if (connection->status != 0) die("%s: status %d: %s", method, connection->status, connection->message);
}

/* ---- the requests ---- */

static void begin(Bytes *message) {
    message->size = 0;
    put(message, "\0\0\0\0", 5);     /* the prefix */
}

static void register_region(Connection *connection, const char *name, const char *key, uint64_t size) {
    Bytes message = {0};
    begin(&message);
    put_text(&message, 1, name);
    put_text(&message, 2, key);
    put_number(&message, 4, size);
    call(connection, "SystemSharedMemoryRegister", &message, "connection");
    free(message.data);
}

/* ModelInfer of `echo`: with a region, INPUT0 is its first `size` bytes and OUTPUT0 the next; otherwise on the wire. */
static void write_infer(Bytes *message, const char *region, const float *tensor, uint64_t size) {
    Bytes input = {0}, output = {0}, shape = {0};
    begin(message);
    put_text(message, 1, "echo");
    put_text(&input, 1, "INPUT0");
    put_text(&input, 2, "FP32");
    put_varint(&shape, size / sizeof *tensor);
    put_message(&input, 3, &shape);
    if (region) put_place(&input, 4, region, 0, size);
    put_message(message, 5, &input);
    if (region) {
        put_text(&output, 1, "OUTPUT0");
        put_place(&output, 2, region, size, size);
        put_message(message, 6, &output);
    } else {
        put_bytes(message, 7, tensor, size);
    }
    free(input.data);
    free(output.data);
    free(shape.data);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

int main(int count_of_arguments, char **arguments) {
    if (count_of_arguments < 2) die("usage: %s SOCKET [BYTES [COUNT]]", arguments[0]);
    size_t size = count_of_arguments > 2 ? strtoul(arguments[2], NULL, 10) / 64 * 64 : 16 << 20;
    int count = count_of_arguments > 3 ? atoi(arguments[3]) : 50;
    Connection *connection = connect_to(arguments[1]);
    Bytes message = {0};
    char key[64];
    double begun, in_place, on_the_wire;

    if (size == 0 || count <= 0) die("expected BYTES of 64 or more, and a COUNT of 1 or more");
    snprintf(key, sizeof key, "/inferd-example-%d", (int)getpid());
    int object = shm_open(key, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (object < 0 || ftruncate(object, (off_t)(2 * size)) != 0) die("%s: %s", key, strerror(errno));
    float *tensor = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_SHARED, object, 0);
    if (tensor == MAP_FAILED) die("%s: %s", key, strerror(errno));
    float *answer = tensor + size / sizeof *tensor;
    for (size_t i = 0; i < size / sizeof *tensor; i++) tensor[i] = (float)i;

    register_region(connection, "example", key, 2 * size);
    shm_unlink(key);                 /* the server has it: nothing is left when this program is killed */

    write_infer(&message, "example", tensor, size);
    begun = now();
    for (int i = 0; i < count; i++) call(connection, "ModelInfer", &message, "connection");
    in_place = (now() - begun) / count;
    if (memcmp(answer, tensor, size) != 0) die("wrong answer in shared memory");

    begun = now();
    for (int i = 0; i < count; i++) {
        write_infer(&message, NULL, tensor, size);  /* a new tensor is copied into a new message */
        call(connection, "ModelInfer", &message, "connection");
    }
    on_the_wire = (now() - begun) / count;
    if (connection->response.size < size ||
        memcmp(connection->response.data + connection->response.size - size, tensor, size) != 0)
        die("wrong answer on the wire");

    printf("%zu bytes there and back: %.0f us in shared memory, %.0f us on the wire\n", size, in_place, on_the_wire);
    return 0;
}
