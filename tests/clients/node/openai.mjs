// node openai.mjs BASE_URL MODEL
//
// OpenAI's own package: an answer, a stream, errors and a stream that is left, printed as
// one line of JSON.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me of lighthouses." }];
const asked = { model, messages, max_tokens: 12, seed: 7 };

/** The error that a request is refused with. */
async function refusal(request) {
  try {
    await client.chat.completions.create(request);
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param };
  }
  return null;
}

const { data: whole, response } = await client.chat.completions.create(asked).withResponse();

const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
const chunks = [];
for await (const chunk of stream) chunks.push(chunk);

const left = await client.chat.completions.create({ ...asked, max_tokens: 1900, stream: true });
for await (const _ of left) break;

const helper = await client.chat.completions.stream(asked).finalChatCompletion();
const models = [];
for await (const each of client.models.list()) models.push(each.id);

console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    finish_reason: whole.choices[0].finish_reason,
    usage: whole.usage,
    request_id: response.headers.get("x-request-id"),
    streamed_text: chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""),
    streamed_usage: chunks.at(-1).usage,
    helper_text: helper.choices[0].message.content,
    models,
    bad_field: await refusal({ ...asked, max_tokens: 0 }),
    other_model: await refusal({ ...asked, model: "gpt-4o" }),
  }),
);
