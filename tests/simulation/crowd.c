/* Clients of a simulation that ask much, for little: they write and read HTTP/2, gRPC and protobuf here.

A crowd has lines, each of which is a connection. Python says when a line asks, writes and reads; what is said and
checked is said and checked here: one outcome for each call, the right bytes by the number of each request, windows, the
order of frames, deadlines, the order of answers where it is promised, and one execution for each request. An answer
that is a refusal is handed to Python, whose oracle knows which are allowed. */

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST (1LL << 31)     /* numbers of requests; other clients have lower ones */
#define SCALE (1LL << 20)     /* numbers are multiples of it in tensors */
#define FIRST_QUESTION (1 << 28) /* numbers of these; see kind.py */
#define QUESTIONS 6           /* different ones that are asked of models which reuse answers */
#define CALLS 90              /* open ones of a line */
#define KINDS 64
#define OUTPUTS 4
#define FRAME 16384
#define BLOCKS 1024           /* header blocks that are known, a power of two */
#define MOST_STATUSES 128
#define LATE 4                /* grpc-status: DEADLINE_EXCEEDED */
#define RESET 100             /* and the code of RST_STREAM: in place of a status */
#define LARGEST_WIDTH 1500
#define MICROSECOND 1000
#define SECOND 1000000000LL
#define HOUR (3600 * SECOND)
#define INITIAL_WINDOW 65535
#define UNCOMMON 0xffff       /* grpc-status is lacking */
#define TEXT 512

enum frame_kind { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, NO_ERROR = 0, CANCEL = 8 };

/* what a kind of model is; see crowd.py */
enum { REUSES = 1, FAILS = 2, ORDERED = 4, ONCE = 8, TOLD = 16, LACKS = 32 };

/* what is known of a stream, in place of its call */
enum { OVER = 0xffff, CANCELLED = 0xfffe };

struct kind {
    char name[32];
    char outputs[OUTPUTS][8];
    int factors[OUTPUTS], even_factor, output_count;
    int flags, max_rows, levels, level;
    int weight, bit;
    int64_t since_ns; /* the version that serves */
    uint64_t over;
};

struct block { /* of headers, as the server sends it */
    uint64_t hash;
    char *data;
    int size, status, index;
};

struct call {
    int64_t number, content;
    int64_t deadline_ns, opened_ns, arrived_ns; /* arrived: its HEADERS */
    int64_t window, credit;
    uint64_t head_end; /* of all bytes of the line */
    uint64_t place;
    char *body, *data; /* what is not sent yet; what has come */
    size_t body_size, body_at, data_size, data_room;
    uint32_t stream;
    int kind, rows, width, level, sign;
    int is_open, has_headers, ends_alone, is_anonymous;
    int never_ends; /* its end is forgotten */
};

struct refusal {
    int64_t number, content, deadline_ns, opened_ns;
    int32_t kind, level, status, block;
};

struct bytes {
    char *data;
    size_t size, room;
};

struct crowd {
    struct kind kinds[KINDS];
    int kind_count, weights;
    int64_t asked, most;
    uint64_t *executed; /* by number: by which models */
    uint64_t statuses[MOST_STATUSES], answered, cancelled;
    struct block blocks[BLOCKS];
    int (*learn)(const char *block, int size, int *index);
    char problem[TEXT];
    struct bytes log;
    int logs, lies;
};

struct mood {
    int32_t window, conn_window;
    int32_t cancels_ppm, hurried, has_deadlines, indexed, single_rows, usual_widths, large_ppm, split_permille;
    int64_t strict_ns; /* that an outcome may come behind its deadline; negative: any time */
};

struct line {
    struct crowd *crowd;
    struct mood mood;
    struct call calls[CALLS];
    uint16_t free_slots[CALLS], unsent[CALLS];
    uint16_t *streams; /* slots of calls, OVER or CANCELLED */
    size_t stream_room;
    int free_count, unsent_count, number;
    uint32_t next_stream;
    int64_t send_window, initial_window, credit;
    int acknowledged, has_table, went_away;
    uint32_t last_taken; /* once it went away: the last stream that the server has taken */
    uint64_t written, carried; /* bytes */
    uint64_t random, places;
    struct bytes out, in, block;
    size_t out_at;
    uint32_t block_stream; /* in the middle of whose header block */
    int block_flags;
    int64_t jumped_ns, pressed_ns; /* when the machine stood still last, or had too much to do */
    uint64_t order[KINDS];
    int64_t order_since[KINDS];
    struct refusal refusals[CALLS];
    int refusal_count, over_count;
};

/* ------------------------------------------------------------------------------------------------------------------ */
/* What happens */

static int fail(struct line *line, const char *format, ...) {
    va_list arguments;
    if (line->crowd->problem[0]) return -1;
    va_start(arguments, format);
    vsnprintf(line->crowd->problem, sizeof line->crowd->problem, format, arguments);
    va_end(arguments);
    return -1;
}

static void append(struct bytes *to, const void *data, size_t size) {
    if (to->size + size > to->room) {
        to->room = 2 * (to->size + size) + 4096;
        to->data = realloc(to->data, to->room);
        if (to->data == NULL) abort();
    }
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

static void tell(struct line *line, const char *format, ...) {
    char text[TEXT];
    int size;
    va_list arguments;
    if (!line->crowd->logs) return;
    va_start(arguments, format);
    size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    append(&line->crowd->log, text, size < TEXT ? (size_t)size : TEXT - 1);
    append(&line->crowd->log, "\n", 1);
}

static const char *described(struct line *line, const struct call *call) {
    static char text[TEXT];
    int size = snprintf(text, sizeof text, "call %lld of crowd %d to %s", (long long)call->number, line->number,
                        line->crowd->kinds[call->kind].name);
    if (call->deadline_ns >= 0)
        snprintf(text + size, sizeof text - (size_t)size, " deadline %lld us",
                 (long long)(call->deadline_ns / MICROSECOND));
    return text;
}

static uint64_t draw(struct line *line) {
    line->random ^= line->random << 13;
    line->random ^= line->random >> 7;
    line->random ^= line->random << 17;
    return (line->random * 2685821657736338717u) >> 24;
}

static int below(struct line *line, int most) { return (int)(draw(line) % (uint64_t)most); }

/* ------------------------------------------------------------------------------------------------------------------ */
/* To the server */

static char *put_varint(char *at, uint64_t value) {
    for (; value >= 128; value >>= 7) *at++ = (char)(value | 128);
    *at++ = (char)value;
    return at;
}

static char *put_text(char *at, int tag, const char *text, size_t size) {
    *at++ = (char)tag;
    at = put_varint(at, size);
    memcpy(at, text, size);
    return at + size;
}

static void put_frame(struct line *line, int kind, int flags, uint32_t stream, const void *payload, size_t size) {
    unsigned char head[9] = {(unsigned char)(size >> 16), (unsigned char)(size >> 8), (unsigned char)size,
                             (unsigned char)kind, (unsigned char)flags, (unsigned char)(stream >> 24),
                             (unsigned char)(stream >> 16), (unsigned char)(stream >> 8), (unsigned char)stream};
    append(&line->out, head, sizeof head);
    append(&line->out, payload, size);
    line->written += sizeof head + size;
}

static void put_number_frame(struct line *line, int kind, uint32_t stream, uint32_t number) {
    unsigned char payload[4] = {(unsigned char)(number >> 24), (unsigned char)(number >> 16),
                                (unsigned char)(number >> 8), (unsigned char)number};
    put_frame(line, kind, 0, stream, payload, sizeof payload);
}

static char *put_literal(char *at, int how, const char *name, const char *value) {
    if (how & 0x3f) {
        *at++ = (char)how; /* the name is one of the static table's */
    } else {
        *at++ = (char)how;
        *at++ = (char)strlen(name);
        at = stpcpy(at, name);
    }
    *at++ = (char)strlen(value);
    return stpcpy(at, value);
}

static size_t header_block(struct line *line, char *block, int64_t deadline_ns) {
    static const char path[] = "/inference.GRPCInferenceService/ModelInfer";
    char *at = block, timeout[32];
    int indexed = line->mood.indexed;
    *at++ = (char)0x83; /* :method POST */
    *at++ = (char)0x86; /* :scheme http */
    if (indexed && line->has_table) {
        memcpy(at, "\xc1\xc0\xbf\xbe", 4);
        at += 4;
    } else {
        at = put_literal(at, indexed ? 0x44 : 0x04, ":path", path);
        at = put_literal(at, indexed ? 0x41 : 0x01, ":authority", "sim");
        at = put_literal(at, indexed ? 0x40 : 0x00, "te", "trailers");
        at = put_literal(at, indexed ? 0x40 : 0x00, "content-type", "application/grpc");
        line->has_table = indexed;
    }
    if (deadline_ns >= 0) {
        if (deadline_ns < 90 * SECOND)
            snprintf(timeout, sizeof timeout, "%lldu", (long long)(deadline_ns / MICROSECOND));
        else
            snprintf(timeout, sizeof timeout, "%lldS", (long long)(deadline_ns / SECOND));
        at = put_literal(at, 0, "grpc-timeout", timeout);
    }
    return (size_t)(at - block);
}

static int64_t element(const struct call *call, int row, int column) {
    int64_t first = call->content * SCALE;
    return column == 0 ? call->sign * (first + row) : first + (int64_t)row * call->width + column;
}

static size_t request_body(struct line *line, struct call *call, char *body) {
    const struct kind *kind = &line->crowd->kinds[call->kind];
    char tensor[64], parameter[32], id[24], *at = body + 5, *end;
    size_t count = (size_t)call->rows * (size_t)call->width, size;
    int row, column, id_size = snprintf(id, sizeof id, "%lld", (long long)call->number);
    at = put_text(at, 0x0a, kind->name, strlen(kind->name));
    if (!call->is_anonymous) at = put_text(at, 0x1a, id, (size_t)id_size);
    if (call->level) {
        end = put_text(parameter, 0x0a, "priority", 8);
        *end++ = 0x12;
        *end++ = 2;
        *end++ = 0x10; /* int64_param */
        *end++ = (char)call->level;
        at = put_text(at, 0x22, parameter, (size_t)(end - parameter));
    }
    end = put_text(put_text(tensor, 0x0a, "x", 1), 0x12, "INT64", 5);
    {
        char shape[20], *stop = put_varint(put_varint(shape, (uint64_t)call->rows), (uint64_t)call->width);
        end = put_text(end, 0x1a, shape, (size_t)(stop - shape));
    }
    at = put_text(at, 0x2a, tensor, (size_t)(end - tensor));
    *at++ = 0x3a;
    at = put_varint(at, 8 * count);
    for (row = 0; row < call->rows; row++)
        for (column = 0; column < call->width; column++, at += 8) {
            int64_t value = element(call, row, column);
            memcpy(at, &value, 8);
        }
    size = (size_t)(at - body);
    body[0] = 0;
    body[1] = (char)((size - 5) >> 24), body[2] = (char)((size - 5) >> 16);
    body[3] = (char)((size - 5) >> 8), body[4] = (char)(size - 5);
    return size;
}

/* Send of a call's body what windows allow, `limit` bytes at most; how many. */
static size_t push(struct line *line, struct call *call, const char *body, size_t size, size_t limit) {
    size_t sent = 0;
    int is_last = !call->ends_alone && !call->never_ends;
    while (sent < size) {
        int64_t room = call->window < line->send_window ? call->window : line->send_window;
        size_t part = size - sent;
        if (part > FRAME) part = FRAME;
        if (part > limit - sent) part = limit - sent;
        if (room <= 0 || part == 0) break;
        if (part > (size_t)room) part = (size_t)room;
        put_frame(line, DATA, is_last && sent + part == size ? END_STREAM : 0, call->stream, body + sent,
                  part);
        sent += part;
        call->window -= (int64_t)part;
        line->send_window -= (int64_t)part;
    }
    if (sent == size) {
        if (call->ends_alone && !call->never_ends) put_frame(line, DATA, END_STREAM, call->stream, "", 0);
        call->place = ++line->places;
    }
    return sent;
}

static void forget_body(struct line *line, struct call *call) {
    int i, at = 0;
    free(call->body);
    call->body = NULL;
    for (i = 0; i < line->unsent_count; i++)
        if (&line->calls[line->unsent[i]] != call) line->unsent[at++] = line->unsent[i];
    line->unsent_count = at;
}

/* Send what windows allow of what is not sent yet, the calls in their order. */
static void push_unsent(struct line *line) {
    while (line->unsent_count) {
        struct call *call = &line->calls[line->unsent[0]];
        size_t left = call->body_size - call->body_at;
        if (line->send_window <= 0) return;
        call->body_at += push(line, call, call->body + call->body_at, left, left);
        if (call->body_at < call->body_size) return;
        forget_body(line, call);
    }
}

static int draw_kind(struct line *line) {
    struct crowd *crowd = line->crowd;
    int chosen = below(line, crowd->weights), i;
    for (i = 0; chosen >= crowd->kinds[i].weight; i++) chosen -= crowd->kinds[i].weight;
    return i;
}

static void draw_call(struct line *line, struct call *call, int chosen) {
    static const int64_t hurried[] = {-1, 0, 50 * MICROSECOND, 300 * MICROSECOND, 2000 * MICROSECOND, HOUR};
    const struct kind *kind = &line->crowd->kinds[chosen];
    memset(call, 0, sizeof *call);
    call->kind = chosen;
    call->number = FIRST + line->crowd->asked++;
    call->content = call->number;
    call->rows = below(line, 100) < line->mood.single_rows ? 1 : 1 + below(line, kind->max_rows);
    call->width = below(line, 100) < line->mood.usual_widths ? 4 : 2 + below(line, 5);
    if (below(line, 1000000) < line->mood.large_ppm) call->width = 2 + below(line, LARGEST_WIDTH);
    if (kind->flags & REUSES && below(line, 10) < 8) {
        call->content = FIRST_QUESTION + below(line, QUESTIONS);
        call->rows = 1 + (int)(call->content % 2);
        call->width = 4;
    }
    call->sign = kind->flags & FAILS && below(line, 100) < 5 ? -1 : 1;
    if (kind->levels > 1 && below(line, 10) < 8) call->level = 1 + below(line, kind->levels);
    call->deadline_ns = -1;
    if (line->mood.has_deadlines)
        call->deadline_ns = line->mood.hurried ? hurried[below(line, 6)] : below(line, 4) ? -1 : HOUR;
    call->ends_alone = below(line, 16) == 0;
    call->is_anonymous = below(line, 8) == 0;
    call->is_open = 1;
}

static void begin_call(struct line *line, int chosen, int64_t now, int forgets) {
    char block[256], small[16384];
    int slot = line->free_slots[--line->free_count];
    struct call *call = &line->calls[slot];
    size_t most, size, sent, limit;
    char *body;
    draw_call(line, call, chosen);
    call->opened_ns = now;
    call->arrived_ns = INT64_MAX;
    call->stream = line->next_stream;
    call->window = line->initial_window;
    call->credit = line->mood.window;
    line->next_stream += 2;
    if (call->stream / 2 >= line->stream_room) {
        line->stream_room = 2 * line->stream_room + 1024;
        line->streams = realloc(line->streams, line->stream_room * sizeof *line->streams);
        if (line->streams == NULL) abort();
    }
    line->streams[call->stream / 2] = (uint16_t)slot;
    put_frame(line, HEADERS, END_HEADERS, call->stream, block, header_block(line, block, call->deadline_ns));
    call->head_end = line->written;
    most = 256 + 8 * (size_t)call->rows * (size_t)call->width;
    body = most <= sizeof small ? small : malloc(most);
    if (body == NULL) abort();
    size = request_body(line, call, body);
    limit = below(line, 1000) < line->mood.split_permille ? (size_t)below(line, (int)size) : size;
    call->never_ends = forgets;
    sent = line->unsent_count ? 0 : push(line, call, body, size, limit);
    if (sent < size) {
        call->body = malloc(size);
        if (call->body == NULL) abort();
        memcpy(call->body, body, size);
        call->body_size = size;
        call->body_at = sent;
        line->unsent[line->unsent_count++] = (uint16_t)slot;
    }
    if (body != small) free(body);
    tell(line, "calls %s as %lld: [%d, %d], deadline %lld us", line->crowd->kinds[chosen].name,
         (long long)call->number, call->rows, call->width,
         call->deadline_ns < 0 ? -1 : (long long)(call->deadline_ns / MICROSECOND));
}

/* Begin so many calls, or as many as may be open; how many. `forgets`: the end of the last one is not sent. */
int line_ask(struct line *line, int count, int64_t now, int forgets) {
    int begun, one = below(line, 2) ? draw_kind(line) : -1; /* a burst may ask one model */
    if (line->went_away) return 0; /* it asks more on its next connection */
    if (line->crowd->most - line->crowd->asked < count) count = (int)(line->crowd->most - line->crowd->asked);
    for (begun = 0; begun < count && line->free_count; begun++)
        begin_call(line, one >= 0 ? one : draw_kind(line), now,
                   forgets && line->crowd->asked + 1 == line->crowd->most);
    push_unsent(line);
    return begun;
}

static void end_call(struct line *line, struct call *call, int state) {
    if (call->body != NULL) forget_body(line, call);
    free(call->data);
    call->data = NULL;
    call->is_open = 0;
    line->streams[call->stream / 2] = (uint16_t)state;
    line->crowd->kinds[call->kind].over++;
    line->free_slots[line->free_count++] = (uint16_t)(call - line->calls);
}

/* Give up some of the open calls; how many. */
int line_cancel(struct line *line, int ppm) {
    int slot, count = 0;
    for (slot = 0; slot < CALLS; slot++) {
        struct call *call = &line->calls[slot];
        if (!call->is_open || below(line, 1000000) >= ppm) continue;
        tell(line, "cancels %lld", (long long)call->number);
        put_number_frame(line, RST_STREAM, call->stream, CANCEL);
        end_call(line, call, CANCELLED);
        line->crowd->cancelled++;
        count++;
    }
    return count;
}

/* What waits to be carried to the server. */
const char *line_out(struct line *line, size_t *size) {
    *size = line->out.size - line->out_at;
    return line->out.data + line->out_at;
}

/* So much of it has come there. */
void line_carried(struct line *line, size_t size, int64_t now) {
    int slot;
    line->out_at += size;
    line->carried += size;
    if (line->out_at == line->out.size) line->out.size = line->out_at = 0;
    for (slot = 0; slot < CALLS; slot++) {
        struct call *call = &line->calls[slot];
        if (call->is_open && call->arrived_ns == INT64_MAX && call->head_end <= line->carried) call->arrived_ns = now;
    }
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* From the server */

struct reader {
    const unsigned char *at, *end;
    int broken;
};

static uint64_t varint(struct reader *reader) {
    uint64_t value = 0;
    int shift;
    for (shift = 0; shift < 70 && reader->at < reader->end; shift += 7) {
        unsigned char byte = *reader->at++;
        value |= shift < 64 ? (uint64_t)(byte & 127) << shift : 0;
        if (byte < 128) return value;
    }
    reader->broken = 1;
    return 0;
}

/* the field that comes next, if its value has a length; 0: none is left */
static int next_field(struct reader *reader, struct reader *value) {
    while (reader->at < reader->end && !reader->broken) {
        uint64_t tag = varint(reader), size;
        if ((tag & 7) == 0) {
            varint(reader);
            continue;
        }
        size = (tag & 7) == 2 ? varint(reader) : UINT64_MAX;
        if (reader->broken || size > (uint64_t)(reader->end - reader->at)) return reader->broken = 1, 0;
        *value = (struct reader){reader->at, reader->at + size, 0};
        reader->at += size;
        return (int)(tag >> 3);
    }
    return 0;
}

static int is_text(const struct reader *value, const char *text) {
    size_t size = strlen(text);
    return (size_t)(value->end - value->at) == size && memcmp(value->at, text, size) == 0;
}

static int check_output(struct line *line, struct call *call, struct reader output, const char *name) {
    struct reader value;
    int field;
    uint64_t rows = 0, width = 0;
    while ((field = next_field(&output, &value))) {
        if (field == 1 && !is_text(&value, name))
            return fail(line, "%s: an output has the name '%.*s', not '%s'", described(line, call),
                        (int)(value.end - value.at), (const char *)value.at, name);
        if (field == 2 && !is_text(&value, "INT64"))
            return fail(line, "%s: output '%s' has another datatype", described(line, call), name);
        if (field == 3) {
            rows = varint(&value);
            width = varint(&value);
            if (value.broken || value.at != value.end) rows = 0;
        }
    }
    if (output.broken || rows != (uint64_t)call->rows || width != (uint64_t)call->width)
        return fail(line, "%s: output '%s' has shape [%llu, %llu], not [%d, %d]", described(line, call), name,
                    (unsigned long long)rows, (unsigned long long)width, call->rows, call->width);
    return 0;
}

static int check_numbers(struct line *line, struct call *call, struct reader data, int output) {
    const struct kind *kind = &line->crowd->kinds[call->kind];
    int factor = kind->factors[output], row, column;
    if (output == 0 && kind->even_factor && call->content % 2 == 0) factor = kind->even_factor;
    if ((size_t)(data.end - data.at) != 8 * (size_t)call->rows * (size_t)call->width)
        return fail(line, "%s: %d bytes of numbers", described(line, call), (int)(data.end - data.at));
    for (row = 0; row < call->rows; row++)
        for (column = 0; column < call->width; column++, data.at += 8) {
            int64_t value, expected = element(call, row, column) * (column ? factor : 1);
            memcpy(&value, data.at, 8);
            if (value != expected)
                return fail(line, "%s: %lld where %lld was expected, at [%d, %d] of [%d, %d]", described(line, call),
                            (long long)value, (long long)expected, row, column, call->rows, call->width);
        }
    return 0;
}

/* One message of gRPC: the response to this call. */
static int check_response(struct line *line, struct call *call, const char *data, size_t size) {
    const struct kind *kind = &line->crowd->kinds[call->kind];
    const unsigned char *head = (const unsigned char *)data;
    struct reader message, value, outputs[OUTPUTS], tensors[OUTPUTS];
    char id[24] = "";
    int field, expected, output_count = 0, tensor_count = 0, has_name = 0, has_id = call->is_anonymous, i;
    if (!call->is_anonymous) snprintf(id, sizeof id, "%lld", (long long)call->number);
    if (size < 5 || head[0] != 0 ||
        size - 5 != ((size_t)head[1] << 24 | (size_t)head[2] << 16 | (size_t)head[3] << 8 | head[4]))
        return fail(line, "%s: not one message, but %zu bytes", described(line, call), size);
    message = (struct reader){head + 5, head + size, 0};
    while ((field = next_field(&message, &value))) {
        if (field == 1) {
            has_name = is_text(&value, kind->name);
            if (!has_name) return fail(line, "%s: the answer of another model", described(line, call));
        } else if (field == 3) {
            has_id = is_text(&value, id);
            if (!has_id)
                return fail(line, "%s: the answer of request '%.*s'", described(line, call),
                            (int)(value.end - value.at), (const char *)value.at);
        } else if (field == 5) {
            if (output_count == OUTPUTS) return fail(line, "%s: too many outputs", described(line, call));
            outputs[output_count++] = value;
        } else if (field == 6) {
            if (tensor_count == OUTPUTS) return fail(line, "%s: too many tensors", described(line, call));
            tensors[tensor_count++] = value;
        }
    }
    if (message.broken || !has_name || !has_id)
        return fail(line, "%s: no response with its name and id", described(line, call));
    expected = kind->flags & LACKS && call->content % 2 == 0 ? 1 : kind->output_count;
    if (output_count != expected || tensor_count != expected)
        return fail(line, "%s: %d outputs and %d tensors", described(line, call), output_count, tensor_count);
    for (i = 0; i < output_count; i++)
        if (check_output(line, call, outputs[i], kind->outputs[i]) || check_numbers(line, call, tensors[i], i))
            return -1;
    if (kind->flags & ONCE && call->content >= FIRST &&
        !(line->crowd->executed[call->number - FIRST] >> kind->bit & 1))
        return fail(line, "%s: answered, and never executed", described(line, call));
    if (kind->flags & FAILS && call->sign < 0)
        return fail(line, "%s: its execution failed, and it has an answer", described(line, call));
    return 0;
}

/* A call has its outcome. */
static int finish(struct line *line, struct call *call, int status, int block, int64_t now) {
    struct crowd *crowd = line->crowd;
    int64_t begun_ns = call->opened_ns > call->arrived_ns ? call->opened_ns : call->arrived_ns;
    int64_t due_ns = begun_ns == INT64_MAX ? INT64_MAX : begun_ns + call->deadline_ns;
    if (status == 0) {
        if (crowd->lies && call->number - FIRST == crowd->lies) call->content++;
        if (check_response(line, call, call->data, call->data_size)) return -1;
    } else if (call->data_size && status < RESET) {
        return fail(line, "%s: status %d after %zu bytes of an answer", described(line, call), status,
                    call->data_size);
    } else if (status != LATE || call->deadline_ns < 0 || now < call->opened_ns + call->deadline_ns) {
        line->refusals[line->refusal_count++] =
            (struct refusal){call->number, call->content, call->deadline_ns, call->opened_ns, call->kind,
                             call->level ? call->level : crowd->kinds[call->kind].level, status, block};
    }
    if (call->deadline_ns >= 0 && line->mood.strict_ns >= 0 && line->jumped_ns < call->opened_ns &&
        line->pressed_ns < due_ns && due_ns != INT64_MAX && now > due_ns + line->mood.strict_ns)
        return fail(line, "%s: status %d %lld us after its deadline", described(line, call), status,
                    (long long)((now - due_ns) / MICROSECOND));
    tell(line, "has status %d for %lld", status, (long long)call->number);
    crowd->statuses[status < MOST_STATUSES ? status : MOST_STATUSES - 1]++;
    crowd->answered++;
    line->over_count++;
    end_call(line, call, OVER);
    return 0;
}

/* What a header block says: its status, and the number that Python knows its text by. */
static const struct block *known(struct crowd *crowd, const char *data, int size) {
    uint64_t hash = 14695981039346656037u;
    struct block *block;
    int i;
    for (i = 0; i < size; i++) hash = (hash ^ (unsigned char)data[i]) * 1099511628211u;
    block = &crowd->blocks[(hash ^ hash >> 32) & (BLOCKS - 1)];
    if (block->data != NULL && block->hash == hash && block->size == size && memcmp(block->data, data, (size_t)size) == 0)
        return block;
    free(block->data);
    block->data = malloc((size_t)size + 1);
    if (block->data == NULL) abort();
    memcpy(block->data, data, (size_t)size);
    block->hash = hash;
    block->size = size;
    block->status = crowd->learn(data, size, &block->index);
    return block;
}

/* The call of a stream; NULL: it has been given up, or there is a problem. */
static struct call *call_of(struct line *line, uint32_t stream, const char *what) {
    if (stream % 2 == 0 || stream >= line->next_stream) {
        fail(line, "crowd %d: %s on stream %u, which does not exist", line->number, what, stream);
        return NULL;
    }
    if (line->streams[stream / 2] == OVER) {
        fail(line, "crowd %d: %s on stream %u, which has ended", line->number, what, stream);
        return NULL;
    }
    return line->streams[stream / 2] == CANCELLED ? NULL : &line->calls[line->streams[stream / 2]];
}

static int take_block(struct line *line, int64_t now) {
    struct crowd *crowd = line->crowd;
    uint32_t stream = line->block_stream;
    int last = line->block_flags & END_STREAM;
    const struct block *block = known(crowd, line->block.data, (int)line->block.size);
    struct call *call = call_of(line, stream, "HEADERS");
    struct kind *kind;
    line->block_stream = 0;
    line->block.size = 0;
    if (call == NULL) return crowd->problem[0] ? -1 : 0;
    if (block->status < -1) return fail(line, "%s: headers that none may send", described(line, call));
    if (last) return finish(line, call, block->status < 0 ? UNCOMMON : block->status, block->index, now);
    if (call->has_headers) return fail(line, "%s: second HEADERS", described(line, call));
    call->has_headers = 1;
    kind = &crowd->kinds[call->kind];
    if (kind->flags & ORDERED && call->opened_ns > kind->since_ns) {
        if (line->order_since[call->kind] != kind->since_ns) line->order[call->kind] = 0;
        line->order_since[call->kind] = kind->since_ns;
        if (line->order[call->kind] > call->place)
            return fail(line, "%s: answered after a later one", described(line, call));
        line->order[call->kind] = call->place;
    }
    return 0;
}

static int take_data(struct line *line, uint32_t stream, int flags, const char *payload, size_t size) {
    struct call *call = call_of(line, stream, "DATA");
    line->credit -= (int64_t)size;
    if (line->credit < 0) return fail(line, "crowd %d: more DATA than the window of the connection", line->number);
    if (call == NULL) return line->crowd->problem[0] ? -1 : 0;
    if (!call->has_headers) return fail(line, "%s: DATA before HEADERS", described(line, call));
    if (flags & END_STREAM) return fail(line, "%s: its stream ends without trailers", described(line, call));
    call->credit -= (int64_t)size;
    if (call->credit < 0 && line->acknowledged)
        return fail(line, "%s: more DATA than the window of its stream", described(line, call));
    if (call->data_size + size > call->data_room) {
        call->data_room = 2 * (call->data_size + size);
        call->data = realloc(call->data, call->data_room);
        if (call->data == NULL) abort();
    }
    memcpy(call->data + call->data_size, payload, size);
    call->data_size += size;
    if (call->credit < line->mood.window / 2) {
        put_number_frame(line, WINDOW_UPDATE, stream, (uint32_t)(line->mood.window - call->credit));
        call->credit = line->mood.window;
    }
    return 0;
}

static uint32_t number_at(const char *data) {
    const unsigned char *at = (const unsigned char *)data;
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void take_settings(struct line *line, int flags, const char *payload, size_t size) {
    size_t at;
    int slot;
    if (flags & ACK) {
        line->acknowledged = 1;
        return;
    }
    for (at = 0; at + 6 <= size; at += 6) {
        int64_t value = number_at(payload + at + 2);
        if (payload[at] != 0 || payload[at + 1] != 4) continue;
        for (slot = 0; slot < CALLS; slot++)
            if (line->calls[slot].is_open) line->calls[slot].window += value - line->initial_window;
        line->initial_window = value;
    }
    put_frame(line, SETTINGS, ACK, 0, "", 0);
}

static int take_reset(struct line *line, uint32_t stream, uint32_t code, int64_t now) {
    struct call *call;
    if (stream < line->next_stream && line->streams[stream / 2] == OVER && code == NO_ERROR) return 0;
    call = call_of(line, stream, "RST_STREAM");
    if (call == NULL) return line->crowd->problem[0] ? -1 : 0;
    return finish(line, call, RESET + (int)code, -1, now);
}

static int take_frame(struct line *line, int kind, int flags, uint32_t stream, const char *payload, size_t size,
                      int64_t now) {
    if (line->block_stream && kind != CONTINUATION)
        return fail(line, "crowd %d: a frame within a header block", line->number);
    switch (kind) {
    case DATA:
        return take_data(line, stream, flags, payload, size);
    case HEADERS:
        line->block_stream = stream;
        line->block_flags = flags;
        append(&line->block, payload, size);
        return flags & END_HEADERS ? take_block(line, now) : 0;
    case CONTINUATION:
        if (line->block_stream != stream) return fail(line, "crowd %d: a CONTINUATION without HEADERS", line->number);
        append(&line->block, payload, size);
        return flags & END_HEADERS ? take_block(line, now) : 0;
    case RST_STREAM:
        return take_reset(line, stream, number_at(payload), now);
    case SETTINGS:
        take_settings(line, flags, payload, size);
        return 0;
    case PING:
        if (!(flags & ACK)) put_frame(line, PING, ACK, 0, payload, size);
        return 0;
    case GOAWAY:
        line->went_away = 1;
        line->last_taken = number_at(payload);
        return 0;
    case WINDOW_UPDATE:
        if (stream == 0) line->send_window += number_at(payload);
        else if (stream < line->next_stream && line->streams[stream / 2] < CALLS)
            line->calls[line->streams[stream / 2]].window += number_at(payload);
        return 0;
    default:
        return fail(line, "crowd %d: a frame of type %d", line->number, kind);
    }
}

/* Take what has come; how many calls are over, or -1: there is a problem. Refusals are told by line_refusals. */
int line_receive(struct line *line, const char *data, size_t size, int64_t now, int64_t jumped_ns,
                 int64_t pressed_ns) {
    size_t at = 0, frame_size;
    line->over_count = line->refusal_count = 0;
    line->jumped_ns = jumped_ns;
    line->pressed_ns = pressed_ns;
    if (line->in.size) {
        append(&line->in, data, size);
        data = line->in.data;
        size = line->in.size;
    }
    for (; size - at >= 9; at += 9 + frame_size) {
        const unsigned char *head = (const unsigned char *)data + at;
        frame_size = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
        if (frame_size > FRAME) return fail(line, "crowd %d: a frame of %zu bytes", line->number, frame_size);
        if (size - at < 9 + frame_size) break;
        if (take_frame(line, head[3], head[4], number_at(data + at + 5) & 0x7fffffff, data + at + 9, frame_size, now))
            return -1;
    }
    if (line->in.size) {
        memmove(line->in.data, line->in.data + at, size - at);
        line->in.size = size - at;
    } else {
        append(&line->in, data + at, size - at);
    }
    if (line->credit < line->mood.conn_window / 2) {
        put_number_frame(line, WINDOW_UPDATE, 0, (uint32_t)(line->mood.conn_window - line->credit));
        line->credit = line->mood.conn_window;
    }
    push_unsent(line);
    return line->over_count;
}

const struct refusal *line_refusals(struct line *line, int *count) {
    *count = line->refusal_count;
    return line->refusals;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Lines and crowds */

struct line *line_new(struct crowd *crowd, int number, uint64_t seed, const struct mood *mood) {
    struct line *line = calloc(1, sizeof *line);
    unsigned char settings[18] = {0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4};
    int slot;
    if (line == NULL) abort();
    line->crowd = crowd;
    line->mood = *mood;
    line->number = number;
    line->random = seed * 6364136223846793005u + 1442695040888963407u;
    if (line->random == 0) line->random = 1;
    for (slot = 0; slot < CALLS; slot++) line->free_slots[line->free_count++] = (uint16_t)(CALLS - 1 - slot);
    line->next_stream = 1;
    line->send_window = line->initial_window = INITIAL_WINDOW;
    append(&line->out, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    line->written = 24;
    settings[14] = (unsigned char)(mood->window >> 24), settings[15] = (unsigned char)(mood->window >> 16);
    settings[16] = (unsigned char)(mood->window >> 8), settings[17] = (unsigned char)mood->window;
    put_frame(line, SETTINGS, 0, 0, settings, sizeof settings);
    line->credit = INITIAL_WINDOW;
    if (mood->conn_window > INITIAL_WINDOW) {
        put_number_frame(line, WINDOW_UPDATE, 0, (uint32_t)(mood->conn_window - INITIAL_WINDOW));
        line->credit = mood->conn_window;
    }
    return line;
}

/* The end of a line; how many calls were open. */
int line_free(struct line *line) {
    int slot, count = 0;
    for (slot = 0; slot < CALLS; slot++)
        if (line->calls[slot].is_open) {
            end_call(line, &line->calls[slot], CANCELLED);
            count++;
        }
    line->crowd->cancelled += (uint64_t)count;
    free(line->streams);
    free(line->out.data);
    free(line->in.data);
    free(line->block.data);
    free(line);
    return count;
}

int line_went_away(struct line *line) { return line->went_away; }

/* How many open calls the server has taken, as its GOAWAY says. */
int line_taken(struct line *line) {
    uint32_t stream;
    int taken = 0;
    for (stream = 1; stream < line->next_stream && stream <= line->last_taken; stream += 2)
        taken += line->streams[stream / 2] < CALLS;
    return taken;
}

/* The calls that are open, as text. */
void line_waiting(struct line *line, char *text, size_t size) {
    int slot;
    size_t at = 0;
    text[0] = 0;
    for (slot = 0; slot < CALLS && at + 100 < size; slot++)
        if (line->calls[slot].is_open)
            at += (size_t)snprintf(text + at, size - at, "%s%s", at ? ", " : "", described(line, &line->calls[slot]));
}

struct crowd *crowd_new(int64_t most, int (*learn)(const char *, int, int *), int logs, int lies) {
    struct crowd *crowd = calloc(1, sizeof *crowd);
    if (crowd == NULL || (crowd->executed = calloc((size_t)most, sizeof *crowd->executed)) == NULL) abort();
    crowd->most = most;
    crowd->learn = learn;
    crowd->logs = logs;
    crowd->lies = lies;
    return crowd;
}

void crowd_forget_blocks(struct crowd *crowd) {
    int i;
    for (i = 0; i < BLOCKS; i++) {
        free(crowd->blocks[i].data);
        crowd->blocks[i].data = NULL;
    }
}

void crowd_free(struct crowd *crowd) {
    crowd_forget_blocks(crowd);
    free(crowd->executed);
    free(crowd->log.data);
    free(crowd);
}

/* A model; `bit`: its number among all models, steps of others too. */
void crowd_add_kind(struct crowd *crowd, const char *name, int flags, int max_rows, int levels, int level, int weight,
                    int bit) {
    struct kind *kind = &crowd->kinds[crowd->kind_count++];
    if (crowd->kind_count > KINDS || strlen(name) >= sizeof kind->name) abort();
    strcpy(kind->name, name);
    kind->flags = flags;
    kind->max_rows = max_rows;
    kind->levels = levels;
    kind->level = level;
    kind->weight = weight;
    kind->bit = bit;
    crowd->weights += weight;
}

/* An output of the model that was added last. */
void crowd_add_output(struct crowd *crowd, const char *name, int factor, int even_factor) {
    struct kind *kind = &crowd->kinds[crowd->kind_count - 1];
    if (kind->output_count == OUTPUTS || strlen(name) >= sizeof kind->outputs[0]) abort();
    if (kind->output_count == 0) kind->even_factor = even_factor;
    strcpy(kind->outputs[kind->output_count], name);
    kind->factors[kind->output_count++] = factor;
}

/* Another version of a model serves from now on. */
void crowd_loaded(struct crowd *crowd, int kind, int64_t now) { crowd->kinds[kind].since_ns = now; }

/* Calls of a model that are over. */
uint64_t crowd_over(struct crowd *crowd, int kind) { return crowd->kinds[kind].over; }

/* A model with this bit executes these requests, of which some are other clients'; 0: two times, which it must not. */
int crowd_executed(struct crowd *crowd, int bit, int once, const int64_t *numbers, int count) {
    int i;
    for (i = 0; i < count; i++) {
        int64_t at = numbers[i] - FIRST;
        if (at < 0) continue;
        if (at >= crowd->asked) {
            snprintf(crowd->problem, sizeof crowd->problem, "request %lld is executed, and nobody has made it",
                     (long long)numbers[i]);
            return 0;
        }
        if (once && crowd->executed[at] >> bit & 1) {
            snprintf(crowd->problem, sizeof crowd->problem, "request %lld of a crowd is executed again",
                     (long long)numbers[i]);
            return 0;
        }
        crowd->executed[at] |= 1ULL << bit;
    }
    return 1;
}

const char *crowd_problem(struct crowd *crowd) { return crowd->problem; }
int64_t crowd_asked(struct crowd *crowd) { return crowd->asked; }
int64_t crowd_cancelled(struct crowd *crowd) { return (int64_t)crowd->cancelled; }
const uint64_t *crowd_statuses(struct crowd *crowd) { return crowd->statuses; }

/* What has happened since the last call of this, a line each. */
const char *crowd_log(struct crowd *crowd, size_t *size) {
    *size = crowd->log.size;
    crowd->log.size = 0;
    return crowd->log.data;
}
