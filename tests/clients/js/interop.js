// gRPC's interop cases; the names and what each does are from
// https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md
// node interop.js HOST:PORT PROTO; prints one JSON object, for each case "ok" or what it found.

"use strict";

const assert = require("node:assert");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, proto] = process.argv.slice(2);
const definition = protoLoader.loadSync(proto, { includeDirs: [path.dirname(proto)], keepCase: true, defaults: true });
const { TestService, UnimplementedService } = grpc.loadPackageDefinition(definition).grpc.testing;
const LARGE = { "grpc.max_receive_message_length": -1 };
const client = new TestService(address, grpc.credentials.createInsecure(), LARGE);
const gzip = new TestService(address, grpc.credentials.createInsecure(), {
  ...LARGE,
  "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
});

const SENT = [27182, 8, 1828, 45904];
const ASKED = [31415, 9, 2653, 58979];
const SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";
const INITIAL = "x-grpc-test-echo-initial";
const TRAILING = "x-grpc-test-echo-trailing-bin";

const payload = (size) => ({ body: Buffer.alloc(size) });
const wanted = (sizes, more = {}) => ({ response_parameters: sizes.map((size) => ({ size })), ...more });
const large = { response_size: 314159, payload: payload(271828) };

// A unary or client streaming call: its answer or error, and its metadata.
function called(start) {
  return new Promise((resolve) => {
    const seen = {};
    const call = start((error, response) => {
      seen.error = error;
      seen.response = response;
    });
    call.on("metadata", (metadata) => (seen.initial = metadata));
    call.on("status", (status) => {
      seen.status = status;
      setImmediate(() => resolve(seen));
    });
  });
}

// Everything that comes on a stream; `onData` may write, end or cancel.
function streamed(call, onData = () => {}) {
  return new Promise((resolve) => {
    const seen = { sizes: [] };
    call.on("metadata", (metadata) => (seen.initial = metadata));
    call.on("data", (answer) => {
      seen.sizes.push(answer.payload.body.length);
      onData(seen.sizes.length);
    });
    call.on("error", (error) => (seen.error = error));
    call.on("status", (status) => {
      seen.status = status;
      resolve(seen);
    });
  });
}

async function inputs(from) {
  const { response } = await called((done) => {
    const call = from.StreamingInputCall(done);
    SENT.forEach((size) => call.write({ payload: payload(size) }));
    call.end();
    return call;
  });
  assert.strictEqual(response.aggregated_payload_size, SENT.reduce((sum, size) => sum + size));
}

async function status(message) {
  const response_status = { code: 2, message };
  const unary = await called((done) => client.UnaryCall({ response_status }, done));
  assert.strictEqual(unary.error.code, 2);
  assert.strictEqual(unary.error.details, message);
  const call = client.FullDuplexCall();
  call.write(wanted([], { response_status }));
  call.end();
  const duplex = await streamed(call);
  assert.strictEqual(duplex.status.code, 2);
  assert.strictEqual(duplex.status.details, message);
}

const CASES = {
  async empty_unary() {
    assert.deepStrictEqual((await called((done) => client.EmptyCall({}, done))).response, {});
  },
  async large_unary() {
    const { response } = await called((done) => client.UnaryCall(large, done));
    assert.strictEqual(response.payload.body.length, 314159);
  },
  async client_compressed_unary() {
    const { response } = await called((done) => gzip.UnaryCall(large, done));
    assert.strictEqual(response.payload.body.length, 314159);
  },
  async server_compressed_unary() {
    for (const value of [true, false]) {
      const { response } = await called((done) => client.UnaryCall({ ...large, response_compressed: { value } }, done));
      assert.strictEqual(response.payload.body.length, 314159);
    }
  },
  async client_streaming() {
    await inputs(client);
  },
  async client_compressed_streaming() {
    await inputs(gzip);
  },
  async server_streaming() {
    assert.deepStrictEqual((await streamed(client.StreamingOutputCall(wanted(ASKED)))).sizes, ASKED);
  },
  async server_compressed_streaming() {
    const response_parameters = ASKED.map((size, n) => ({ size, compressed: { value: n % 2 === 0 } }));
    assert.deepStrictEqual((await streamed(client.StreamingOutputCall({ response_parameters }))).sizes, ASKED);
  },
  async ping_pong() {
    const call = client.FullDuplexCall();
    const send = (n) => (n < SENT.length ? call.write(wanted([ASKED[n]], { payload: payload(SENT[n]) })) : call.end());
    send(0);
    const seen = await streamed(call, send);
    assert.deepStrictEqual(seen.sizes, ASKED);
    assert.strictEqual(seen.status.code, 0);
  },
  async empty_stream() {
    const call = client.FullDuplexCall();
    call.end();
    const seen = await streamed(call);
    assert.deepStrictEqual(seen.sizes, []);
    assert.strictEqual(seen.status.code, 0);
  },
  async cancel_after_begin() {
    const { error } = await called((done) => {
      const call = client.StreamingInputCall(done);
      setImmediate(() => call.cancel());
      return call;
    });
    assert.strictEqual(error.code, 1);
  },
  async cancel_after_first_response() {
    const call = client.FullDuplexCall();
    call.write(wanted([31415], { payload: payload(27182) }));
    const seen = await streamed(call, () => call.cancel());
    assert.strictEqual(seen.status.code, 1);
  },
  async timeout_on_sleeping_server() {
    const call = client.FullDuplexCall({ deadline: Date.now() + 1 });
    call.on("error", () => {});
    call.write({ response_parameters: [{ size: 31415, interval_us: 2000000 }], payload: payload(27182) });
    assert.strictEqual((await streamed(call)).status.code, 4);
  },
  async custom_metadata() {
    const metadata = new grpc.Metadata();
    metadata.set(INITIAL, "test_initial_metadata_value");
    metadata.set(TRAILING, Buffer.from("ababab", "hex"));
    const unary = await called((done) => client.UnaryCall(large, metadata, done));
    const call = client.FullDuplexCall(metadata);
    call.write(wanted([314159], { payload: payload(271828) }));
    call.end();
    for (const seen of [unary, await streamed(call)]) {
      assert.deepStrictEqual(seen.initial.get(INITIAL), ["test_initial_metadata_value"]);
      assert.deepStrictEqual(seen.status.metadata.get(TRAILING), [Buffer.from("ababab", "hex")]);
    }
  },
  async status_code_and_message() {
    await status("test status message");
  },
  async special_status_message() {
    await status(SPECIAL);
  },
  async unimplemented() {
    const other = new UnimplementedService(address, grpc.credentials.createInsecure());
    for (const each of [client, other]) {
      assert.strictEqual((await called((done) => each.UnimplementedCall({}, done))).error.code, 12);
    }
    other.close();
  },
};

async function main() {
  const report = {};
  for (const [name, run] of Object.entries(CASES)) {
    try {
      await run();
      report[name] = "ok";
    } catch (error) {
      report[name] = error.message;
    }
  }
  client.close();
  gzip.close();
  console.log(JSON.stringify(report));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
