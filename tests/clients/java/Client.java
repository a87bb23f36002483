import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferResponse;
import inference.GrpcService.ModelMetadataRequest;
import inference.GrpcService.ModelReadyRequest;
import inference.GrpcService.ModelStreamInferResponse;
import inference.GrpcService.ServerLiveRequest;
import inference.GrpcService.ServerMetadataRequest;
import inference.GrpcService.ServerReadyRequest;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.StreamObserver;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Calls a server as a Java program would. Client HOST:PORT; prints one JSON object a line, see ../cases.py. */
public final class Client {
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

    private static String quoted(String text) {
        return '"' + text.replace("\\", "\\\\").replace("\"", "\\\"") + '"';
    }

    private static ModelInferRequest request(String model, String id, String datatype, int count, ByteBuffer raw) {
        return ModelInferRequest.newBuilder()
            .setModelName(model)
            .setId(id)
            .addInputs(ModelInferRequest.InferInputTensor.newBuilder()
                .setName("INPUT0").setDatatype(datatype).addShape(1).addShape(count))
            .addRawInputContents(ByteString.copyFrom(raw.flip()))
            .build();
    }

    private static ModelInferRequest floats(String model, String id, float... values) {
        ByteBuffer raw = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
        for (float value : values) {
            raw.putFloat(value);
        }
        return request(model, id, "FP32", values.length, raw);
    }

    private static ModelInferRequest strings(String... values) {
        ByteBuffer raw = ByteBuffer.allocate(1024).order(ByteOrder.LITTLE_ENDIAN);
        for (String value : values) {
            byte[] bytes = value.getBytes(StandardCharsets.UTF_8);
            raw.putInt(bytes.length).put(bytes);
        }
        return request("strings", "", "BYTES", values.length, raw);
    }

    private static ByteBuffer output(ModelInferResponse response) {
        return response.getRawOutputContents(0).asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    }

    private static List<Float> floatValues(ModelInferResponse response) {
        List<Float> values = new ArrayList<>();
        for (ByteBuffer raw = output(response); raw.hasRemaining();) {
            values.add(raw.getFloat());
        }
        return values;
    }

    private static List<String> stringValues(ModelInferResponse response) {
        List<String> values = new ArrayList<>();
        for (ByteBuffer raw = output(response); raw.hasRemaining();) {
            byte[] bytes = new byte[raw.getInt()];
            raw.get(bytes);
            values.add(quoted(new String(bytes, StandardCharsets.UTF_8)));
        }
        return values;
    }

    private static void printReady(GRPCInferenceServiceBlockingStub stub) {
        boolean live = stub.serverLive(ServerLiveRequest.getDefaultInstance()).getLive();
        boolean server = stub.serverReady(ServerReadyRequest.getDefaultInstance()).getReady();
        boolean model = stub.modelReady(ModelReadyRequest.newBuilder().setName("simple").build()).getReady();
        OUT.printf("{\"case\":\"ready\",\"live\":%b,\"server\":%b,\"model\":%b}%n", live, server, model);
    }

    private static void printMetadata(GRPCInferenceServiceBlockingStub stub) {
        String server = stub.serverMetadata(ServerMetadataRequest.getDefaultInstance()).getName();
        var input = stub.modelMetadata(ModelMetadataRequest.newBuilder().setName("simple").build()).getInputs(0);
        OUT.printf("{\"case\":\"metadata\",\"server\":%s,\"input\":%s,\"datatype\":%s,\"shape\":%s}%n",
            quoted(server), quoted(input.getName()), quoted(input.getDatatype()), input.getShapeList());
    }

    private static void printInfer(GRPCInferenceServiceBlockingStub stub) {
        ModelInferResponse response = stub.modelInfer(floats("simple", "one", 1, 2.5f, -3));
        OUT.printf("{\"case\":\"fp32\",\"id\":%s,\"values\":%s}%n", quoted(response.getId()), floatValues(response));
        response = stub.modelInfer(strings("", "snow \u2603", "abc"));
        OUT.printf("{\"case\":\"bytes\",\"values\":%s}%n", stringValues(response));
        try {
            stub.modelInfer(floats("nothing", "", 1));
        } catch (StatusRuntimeException error) {
            Status status = error.getStatus();
            OUT.printf("{\"case\":\"error\",\"code\":%d,\"message\":%s}%n",
                status.getCode().value(), quoted(status.getDescription()));
        }
    }

    private static void printStream(ManagedChannel channel) throws Exception {
        List<String> answers = new ArrayList<>();
        CompletableFuture<Void> ended = new CompletableFuture<>();
        StreamObserver<ModelInferRequest> requests = GRPCInferenceServiceGrpc.newStub(channel)
            .modelStreamInfer(new StreamObserver<ModelStreamInferResponse>() {
                @Override
                public void onNext(ModelStreamInferResponse answer) {
                    answers.add("[" + quoted(answer.getInferResponse().getId()) + ","
                        + quoted(answer.getErrorMessage()) + "]");
                }

                @Override
                public void onError(Throwable error) {
                    ended.completeExceptionally(error);
                }

                @Override
                public void onCompleted() {
                    ended.complete(null);
                }
            });
        requests.onNext(floats("simple", "first", 1));
        requests.onNext(floats("nothing", "wrong", 1));
        requests.onNext(floats("simple", "last", 2));
        requests.onCompleted();
        ended.get(20, TimeUnit.SECONDS);
        OUT.printf("{\"case\":\"stream\",\"answers\":%s}%n", answers);
    }

    private static void printGzip(GRPCInferenceServiceBlockingStub stub) {
        Status status = Status.OK.withDescription("");
        int bytes = 0;
        try {
            bytes = stub.withCompression("gzip").modelInfer(floats("simple", "", new float[4096]))
                .getRawOutputContents(0).size();
        } catch (StatusRuntimeException error) {
            status = error.getStatus();
        }
        OUT.printf("{\"case\":\"gzip\",\"code\":%d,\"message\":%s,\"bytes\":%d}%n",
            status.getCode().value(), quoted(status.getDescription()), bytes);
    }

    public static void main(String[] arguments) throws Exception {
        ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
        GRPCInferenceServiceBlockingStub stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);
        printReady(stub);
        printMetadata(stub);
        printInfer(stub);
        printStream(channel);
        printGzip(stub);
        channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
}
