// Calls a server as a Go program would: unary calls and a bidirectional stream.
// client HOST:PORT; prints one JSON object a line, see ../cases.py.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	pb "inference"
)

type object map[string]interface{}

func show(name string, fields object) {
	fields["case"] = name
	if err := json.NewEncoder(os.Stdout).Encode(fields); err != nil {
		log.Fatal(err)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func request(model, id, datatype string, count int, raw []byte) *pb.ModelInferRequest {
	return &pb.ModelInferRequest{
		ModelName: model,
		Id:        id,
		Inputs: []*pb.ModelInferRequest_InferInputTensor{
			{Name: "INPUT0", Datatype: datatype, Shape: []int64{1, int64(count)}},
		},
		RawInputContents: [][]byte{raw},
	}
}

func floats(model, id string, values ...float32) *pb.ModelInferRequest {
	var raw bytes.Buffer
	check(binary.Write(&raw, binary.LittleEndian, values))
	return request(model, id, "FP32", len(values), raw.Bytes())
}

func strings(values ...string) *pb.ModelInferRequest {
	var raw bytes.Buffer
	for _, value := range values {
		check(binary.Write(&raw, binary.LittleEndian, uint32(len(value))))
		raw.WriteString(value)
	}
	return request("strings", "", "BYTES", len(values), raw.Bytes())
}

func floatValues(response *pb.ModelInferResponse) []float32 {
	raw := response.RawOutputContents[0]
	values := make([]float32, len(raw)/4)
	check(binary.Read(bytes.NewReader(raw), binary.LittleEndian, values))
	return values
}

func stringValues(response *pb.ModelInferResponse) []string {
	var values []string
	for raw := response.RawOutputContents[0]; len(raw) > 0; {
		end := 4 + binary.LittleEndian.Uint32(raw)
		values = append(values, string(raw[4:end]))
		raw = raw[end:]
	}
	return values
}

func showReady(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	live, err := client.ServerLive(ctx, &pb.ServerLiveRequest{})
	check(err)
	server, err := client.ServerReady(ctx, &pb.ServerReadyRequest{})
	check(err)
	model, err := client.ModelReady(ctx, &pb.ModelReadyRequest{Name: "simple"})
	check(err)
	show("ready", object{"live": live.Live, "server": server.Ready, "model": model.Ready})
}

func showMetadata(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	server, err := client.ServerMetadata(ctx, &pb.ServerMetadataRequest{})
	check(err)
	model, err := client.ModelMetadata(ctx, &pb.ModelMetadataRequest{Name: "simple"})
	check(err)
	input := model.Inputs[0]
	show("metadata", object{"server": server.Name, "input": input.Name, "datatype": input.Datatype, "shape": input.Shape})
}

func showInfer(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	response, err := client.ModelInfer(ctx, floats("simple", "one", 1, 2.5, -3))
	check(err)
	show("fp32", object{"id": response.Id, "values": floatValues(response)})
	response, err = client.ModelInfer(ctx, strings("", "snow \u2603", "abc"))
	check(err)
	show("bytes", object{"values": stringValues(response)})
	_, err = client.ModelInfer(ctx, floats("nothing", "", 1))
	show("error", object{"code": status.Code(err), "message": status.Convert(err).Message()})
}

func showStream(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	stream, err := client.ModelStreamInfer(ctx)
	check(err)
	check(stream.Send(floats("simple", "first", 1)))
	check(stream.Send(floats("nothing", "wrong", 1)))
	check(stream.Send(floats("simple", "last", 2)))
	check(stream.CloseSend())
	var answers [][]string
	for {
		answer, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		answers = append(answers, []string{answer.InferResponse.GetId(), answer.ErrorMessage})
	}
	show("stream", object{"answers": answers})
}

func showGzip(ctx context.Context, client pb.GRPCInferenceServiceClient) {
	message := floats("simple", "", make([]float32, 4096)...)
	response, err := client.ModelInfer(ctx, message, grpc.UseCompressor(gzip.Name))
	result := object{"code": status.Code(err), "message": status.Convert(err).Message(), "bytes": 0}
	if err == nil {
		result["bytes"] = len(response.RawOutputContents[0])
	}
	show("gzip", result)
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	connection, err := grpc.DialContext(ctx, os.Args[1], grpc.WithInsecure(), grpc.WithBlock())
	check(err)
	defer connection.Close()
	client := pb.NewGRPCInferenceServiceClient(connection)
	showReady(ctx, client)
	showMetadata(ctx, client)
	showInfer(ctx, client)
	showStream(ctx, client)
	showGzip(ctx, client)
}
