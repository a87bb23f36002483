// Calls a server through nice-grpc: promises for unary calls, an async iterable for the stream.
// node nice_grpc.js --protos=FOLDER HOST:PORT; prints one JSON object a line, see ../cases.py.

"use strict";

const path = require("node:path");
const { parseArgs } = require("node:util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const { createChannel, createClient, ClientError } = require("nice-grpc");

const { values, positionals } = parseArgs({ options: { protos: { type: "string" } }, allowPositionals: true });
const { protos } = values;
const [address] = positionals;
const definition = protoLoader.loadSync(path.join(protos, "grpc_service.proto"), {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  defaults: true,
});
const { service } = grpc.loadPackageDefinition(definition).inference.GRPCInferenceService;

function show(name, fields) {
  console.log(JSON.stringify({ case: name, ...fields }));
}

function request(model, id, datatype, count, raw) {
  return {
    model_name: model,
    id,
    inputs: [{ name: "INPUT0", datatype, shape: [1, count] }],
    raw_input_contents: [raw],
  };
}

function floats(model, id, values) {
  const raw = Buffer.alloc(4 * values.length);
  values.forEach((value, position) => raw.writeFloatLE(value, 4 * position));
  return request(model, id, "FP32", values.length, raw);
}

function strings(values) {
  const parts = values.flatMap((value) => {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(Buffer.byteLength(value));
    return [length, Buffer.from(value)];
  });
  return request("strings", "", "BYTES", values.length, Buffer.concat(parts));
}

function floatValues(raw) {
  return Array.from({ length: raw.length / 4 }, (_, position) => raw.readFloatLE(4 * position));
}

function stringValues(raw) {
  const values = [];
  for (let at = 0; at < raw.length; ) {
    const end = at + 4 + raw.readUInt32LE(at);
    values.push(raw.toString("utf8", at + 4, end));
    at = end;
  }
  return values;
}

async function* three() {
  yield floats("simple", "first", [1]);
  yield floats("nothing", "wrong", [1]);
  yield floats("simple", "last", [2]);
}

async function failure(call) {
  try {
    await call;
  } catch (error) {
    if (error instanceof ClientError) return { code: error.code, message: error.details };
    throw error;
  }
  return { code: 0, message: "" };
}

async function showGzip() {
  const gzip = createChannel(address, undefined, { "grpc.default_compression_algorithm": 2 });
  let bytes = 0;
  const call = createClient(service, gzip)
    .ModelInfer(floats("simple", "", new Array(4096).fill(0)))
    .then((response) => (bytes = response.raw_output_contents[0].length));
  const result = await failure(call);
  show("gzip", { ...result, bytes });
  gzip.close();
}

async function main() {
  const channel = createChannel(address);
  const client = createClient(service, channel);
  show("ready", {
    live: (await client.ServerLive({})).live,
    server: (await client.ServerReady({})).ready,
    model: (await client.ModelReady({ name: "simple" })).ready,
  });
  const [input] = (await client.ModelMetadata({ name: "simple" })).inputs;
  const { name } = await client.ServerMetadata({});
  show("metadata", { server: name, input: input.name, datatype: input.datatype, shape: input.shape });
  const response = await client.ModelInfer(floats("simple", "one", [1, 2.5, -3]));
  show("fp32", { id: response.id, values: floatValues(response.raw_output_contents[0]) });
  const texts = await client.ModelInfer(strings(["", "snow \u2603", "abc"]));
  show("bytes", { values: stringValues(texts.raw_output_contents[0]) });
  show("error", await failure(client.ModelInfer(floats("nothing", "", [1]))));
  const answers = [];
  for await (const answer of client.ModelStreamInfer(three())) {
    answers.push([answer.infer_response.id, answer.error_message]);
  }
  show("stream", { answers });
  channel.close();
  await showGzip();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
