// node generate.mjs PROTO_ROOT ROUTER PROMPT
//
// A client in another language needs the .proto files and nothing else. Streams an
// answer, then asks for something wrong, and prints what came back as one line of JSON.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [protoRoot, router, prompt] = process.argv.slice(2);

const definition = protoLoader.loadSync("firsttoken/router/v1/inference.proto", {
  includeDirs: [protoRoot],
  keepCase: true,
  enums: String,
  longs: Number,
  defaults: true,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).firsttoken.router.v1;
const client = new InferenceService(router, grpc.credentials.createInsecure());

/** The messages of a stream and the error that ended it, if one did. */
function generate(request) {
  const deadline = Date.now() + 60_000;
  const metadata = new grpc.Metadata();
  metadata.set("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
  return new Promise((resolve) => {
    const messages = [];
    client
      .Generate(request, metadata, { deadline })
      .on("data", (message) => messages.push(message))
      .on("end", () => resolve({ messages, error: null }))
      .on("error", (error) => resolve({ messages, error }));
  });
}

/** Packed little-endian uint32. */
function unpackTokens(bytes) {
  return Array.from({ length: bytes.length / 4 }, (_, index) => bytes.readUInt32LE(4 * index));
}

const chat = { messages: [{ role: "user", content: prompt }] };
const answer = await generate({ chat, sampling: { max_tokens: 8 } });
const refused = await generate({ chat, sampling: { max_tokens: 0 } });
client.close();

const chunks = answer.messages.filter((message) => message.event === "chunk");
const finished = answer.messages.at(-1)?.finished;
console.log(
  JSON.stringify({
    error: answer.error?.message ?? null,
    text: chunks.map(({ chunk }) => chunk.text).join(""),
    token_ids: chunks.flatMap(({ chunk }) => unpackTokens(chunk.token_ids)),
    finish_reason: finished?.finish_reason,
    usage: finished?.usage,
    ledger: finished?.ledger,
    trace_id: finished?.trace_id,
    engine: finished?.engine,
    refused_code: grpc.status[refused.error?.code],
    refused_details: refused.error?.details,
  }),
);
