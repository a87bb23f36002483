// Calls a server as a program in Node.js would: a unary call, a bidirectional stream, an error, a deadline.
// node client.js HOST:PORT PROTO_DIRECTORY; prints one JSON object.

"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, protos] = process.argv.slice(2);
const definition = protoLoader.loadSync(path.join(protos, "grpc_service.proto"), {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  defaults: true,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1,
});

function request(model, values, id) {
  const raw = Buffer.alloc(4 * values.length);
  values.forEach((value, position) => raw.writeFloatLE(value, 4 * position));
  return {
    model_name: model,
    id,
    inputs: [{ name: "INPUT0", datatype: "FP32", shape: [1, values.length] }],
    raw_input_contents: [raw],
  };
}

function floats(response) {
  const raw = response.raw_output_contents[0];
  return Array.from({ length: raw.length / 4 }, (_, position) => raw.readFloatLE(4 * position));
}

function unary(method, message, options = {}) {
  return new Promise((resolve) => {
    client[method](message, options, (error, response) => resolve({ error, response }));
  });
}

function stream(messages) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const call = client.ModelStreamInfer();
    call.on("data", (answer) => answers.push([answer.infer_response.id, answer.error_message]));
    call.on("error", reject);
    call.on("end", () => resolve(answers));
    messages.forEach((message) => call.write(message));
    call.end();
  });
}

function failure({ error }) {
  return { code: error && error.code, details: error && error.details };
}

async function compressed(values) {
  const gzip = new GRPCInferenceService(address, grpc.credentials.createInsecure(), {
    "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
  });
  const response = await new Promise((resolve, reject) => {
    gzip.ModelInfer(request("simple", values, "gzip"), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
  gzip.close();
  return floats(response).length;
}

async function main() {
  const large = Array.from({ length: 300000 }, (_, number) => number);
  const report = {
    ready: (await unary("ServerReady", {})).response.ready,
    unary: floats((await unary("ModelInfer", request("simple", [1, 2, 3], "one"))).response),
    large: floats((await unary("ModelInfer", request("simple", large, "large"))).response).length,
    compressed: await compressed(large),
    parallel: (
      await Promise.all(large.slice(0, 200).map((n) => unary("ModelInfer", request("simple", [n], String(n)))))
    ).every(({ response }, n) => response.id === String(n) && floats(response)[0] === n),
    stream: await stream([
      request("simple", [1], "first"),
      request("nothing", [1], "wrong"),
      request("simple", [2], "last"),
    ]),
    error: failure(await unary("ModelInfer", request("nothing", [1], "wrong"))),
    special: failure(await unary("ModelInfer", request("\u2603 % \n", [1], "wrong"))),
    deadline: failure(await unary("ModelInfer", request("hang", [1], "late"), { deadline: Date.now() + 300 })),
  };
  client.close();
  console.log(JSON.stringify(report));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
