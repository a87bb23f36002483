// Calls a server as a C++ program would: synchronous calls and a bidirectional stream.
// client HOST:PORT; prints one JSON object a line, see ../cases.py.

#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "grpc_service.grpc.pb.h"

namespace {

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

ModelInferRequest request(const std::string& model, const std::string& id, const std::string& datatype,
                          std::int64_t count, const std::string& raw) {
  ModelInferRequest message;
  message.set_model_name(model);
  message.set_id(id);
  auto* input = message.add_inputs();
  input->set_name("INPUT0");
  input->set_datatype(datatype);
  input->add_shape(1);
  input->add_shape(count);
  message.add_raw_input_contents(raw);
  return message;
}

ModelInferRequest floats(const std::string& model, const std::string& id, const std::vector<float>& values) {
  const std::string raw(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  return request(model, id, "FP32", static_cast<std::int64_t>(values.size()), raw);
}

ModelInferRequest strings(const std::vector<std::string>& values) {
  std::string raw;
  for (const auto& value : values) {
    const auto length = static_cast<std::uint32_t>(value.size());
    raw.append(reinterpret_cast<const char*>(&length), sizeof length);
    raw += value;
  }
  return request("strings", "", "BYTES", static_cast<std::int64_t>(values.size()), raw);
}

std::string float_values(const ModelInferResponse& response) {
  const std::string& raw = response.raw_output_contents(0);
  std::ostringstream out;
  for (std::size_t at = 0; at < raw.size(); at += sizeof(float)) {
    float value;
    std::memcpy(&value, raw.data() + at, sizeof value);
    out << (at ? "," : "[") << value;
  }
  return out.str() + "]";
}

std::string string_values(const ModelInferResponse& response) {
  const std::string& raw = response.raw_output_contents(0);
  std::string out;
  std::uint32_t length;
  for (std::size_t at = 0; at < raw.size(); at += sizeof length + length) {
    std::memcpy(&length, raw.data() + at, sizeof length);
    out += (at ? "," : "[") + quoted(raw.substr(at + sizeof length, length));
  }
  return out + "]";
}

void check(const grpc::Status& status) {
  if (status.ok()) return;
  std::cerr << status.error_code() << ": " << status.error_message() << "\n";
  std::exit(1);
}

void print_ready(GRPCInferenceService::Stub& stub) {
  grpc::ClientContext live_context, server_context, model_context;
  inference::ServerLiveResponse live;
  inference::ServerReadyResponse server;
  inference::ModelReadyRequest named;
  inference::ModelReadyResponse model;
  named.set_name("simple");
  check(stub.ServerLive(&live_context, {}, &live));
  check(stub.ServerReady(&server_context, {}, &server));
  check(stub.ModelReady(&model_context, named, &model));
  std::cout << std::boolalpha << "{\"case\":\"ready\",\"live\":" << live.live() << ",\"server\":" << server.ready()
            << ",\"model\":" << model.ready() << "}\n";
}

void print_metadata(GRPCInferenceService::Stub& stub) {
  grpc::ClientContext server_context, model_context;
  inference::ServerMetadataResponse server;
  inference::ModelMetadataRequest named;
  inference::ModelMetadataResponse model;
  named.set_name("simple");
  check(stub.ServerMetadata(&server_context, {}, &server));
  check(stub.ModelMetadata(&model_context, named, &model));
  const auto& input = model.inputs(0);
  std::cout << "{\"case\":\"metadata\",\"server\":" << quoted(server.name()) << ",\"input\":" << quoted(input.name())
            << ",\"datatype\":" << quoted(input.datatype()) << ",\"shape\":[" << input.shape(0) << ","
            << input.shape(1) << "]}\n";
}

void print_infer(GRPCInferenceService::Stub& stub) {
  grpc::ClientContext float_context, string_context, error_context;
  ModelInferResponse response;
  check(stub.ModelInfer(&float_context, floats("simple", "one", {1, 2.5, -3}), &response));
  std::cout << "{\"case\":\"fp32\",\"id\":" << quoted(response.id()) << ",\"values\":" << float_values(response)
            << "}\n";
  check(stub.ModelInfer(&string_context, strings({"", "snow \u2603", "abc"}), &response));
  std::cout << "{\"case\":\"bytes\",\"values\":" << string_values(response) << "}\n";
  const grpc::Status status = stub.ModelInfer(&error_context, floats("nothing", "", {1}), &response);
  std::cout << "{\"case\":\"error\",\"code\":" << status.error_code()
            << ",\"message\":" << quoted(status.error_message()) << "}\n";
}

void print_stream(GRPCInferenceService::Stub& stub) {
  grpc::ClientContext context;
  auto stream = stub.ModelStreamInfer(&context);
  stream->Write(floats("simple", "first", {1}));
  stream->Write(floats("nothing", "wrong", {1}));
  stream->Write(floats("simple", "last", {2}));
  stream->WritesDone();
  std::string answers;
  inference::ModelStreamInferResponse answer;
  while (stream->Read(&answer)) {
    answers += answers.empty() ? "[" : ",";
    answers += "[" + quoted(answer.infer_response().id()) + "," + quoted(answer.error_message()) + "]";
  }
  check(stream->Finish());
  std::cout << "{\"case\":\"stream\",\"answers\":" << answers << "]}\n";
}

void print_gzip(GRPCInferenceService::Stub& stub) {
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  ModelInferResponse response;
  const grpc::Status status = stub.ModelInfer(&context, floats("simple", "", std::vector<float>(4096)), &response);
  std::cout << "{\"case\":\"gzip\",\"code\":" << status.error_code()
            << ",\"message\":" << quoted(status.error_message())
            << ",\"bytes\":" << (status.ok() ? response.raw_output_contents(0).size() : 0) << "}\n";
}

}  // namespace

int main(int, char** argv) {
  auto stub = GRPCInferenceService::NewStub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  print_ready(*stub);
  print_metadata(*stub);
  print_infer(*stub);
  print_stream(*stub);
  print_gzip(*stub);
}
