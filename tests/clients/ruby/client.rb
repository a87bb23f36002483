# frozen_string_literal: true

# Calls a server as a Ruby program would: unary calls and a bidirectional stream.
# ruby -I GENERATED client.rb HOST:PORT; prints one JSON object a line, see ../cases.py.

require 'grpc'
require 'json'
require 'grpc_service_services_pb'

def show(name, **fields)
  puts JSON.generate({ case: name, **fields })
end

def request(model, id, datatype, count, raw)
  tensor = Inference::ModelInferRequest::InferInputTensor.new(name: 'INPUT0', datatype: datatype, shape: [1, count])
  Inference::ModelInferRequest.new(model_name: model, id: id, inputs: [tensor], raw_input_contents: [raw])
end

def floats(model, id, values)
  request(model, id, 'FP32', values.length, values.pack('e*'))
end

def strings(*values)
  request('strings', '', 'BYTES', values.length, values.map { |value| [value.bytesize].pack('V') + value.b }.join)
end

def string_values(raw)
  values = []
  until raw.empty?
    length = raw.unpack1('V')
    values << raw[4, length].force_encoding('UTF-8')
    raw = raw[(4 + length)..]
  end
  values
end

def show_ready(stub)
  show('ready',
       live: stub.server_live(Inference::ServerLiveRequest.new).live,
       server: stub.server_ready(Inference::ServerReadyRequest.new).ready,
       model: stub.model_ready(Inference::ModelReadyRequest.new(name: 'simple')).ready)
end

def show_metadata(stub)
  server = stub.server_metadata(Inference::ServerMetadataRequest.new)
  input = stub.model_metadata(Inference::ModelMetadataRequest.new(name: 'simple')).inputs.first
  show('metadata', server: server.name, input: input.name, datatype: input.datatype, shape: input.shape.to_a)
end

def show_infer(stub)
  response = stub.model_infer(floats('simple', 'one', [1, 2.5, -3]))
  show('fp32', id: response.id, values: response.raw_output_contents.first.unpack('e*'))
  response = stub.model_infer(strings('', "snow \u2603", 'abc'))
  show('bytes', values: string_values(response.raw_output_contents.first))
  begin
    stub.model_infer(floats('nothing', '', [1]))
  rescue GRPC::BadStatus => e
    show('error', code: e.code, message: e.details.dup.force_encoding('UTF-8'))
  end
end

def show_stream(stub)
  requests = [floats('simple', 'first', [1]), floats('nothing', 'wrong', [1]), floats('simple', 'last', [2])]
  answers = stub.model_stream_infer(requests).map { |answer| [answer.infer_response&.id.to_s, answer.error_message] }
  show('stream', answers: answers)
end

def show_gzip(address)
  options = GRPC::Core::CompressionOptions.new(default_algorithm: :gzip).to_channel_arg_hash
  stub = Inference::GRPCInferenceService::Stub.new(address, :this_channel_is_insecure, channel_args: options)
  response = stub.model_infer(floats('simple', '', [0.0] * 4096))
  show('gzip', code: 0, message: '', bytes: response.raw_output_contents.first.bytesize)
rescue GRPC::BadStatus => e
  show('gzip', code: e.code, message: e.details, bytes: 0)
end

address = ARGV.fetch(0)
stub = Inference::GRPCInferenceService::Stub.new(address, :this_channel_is_insecure)
show_ready(stub)
show_metadata(stub)
show_infer(stub)
show_stream(stub)
show_gzip(address)
