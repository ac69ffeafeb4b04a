// What an OpenAI client of Node gets from a gateway in front of the fake engine: node openai_client.mjs BASE_URL.
// Prints one JSON object. The package lies where OPENAI_NODE says.
const { default: OpenAI } = await import(process.env.OPENAI_NODE);

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "abc" }];
const asked = { model: "echo", messages, max_tokens: 7 };

const whole = await client.chat.completions.create(asked);
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const schema = { type: "object", properties: {}, additionalProperties: false };
const tools = [{ type: "function", function: { name: "look", parameters: schema } }];
const forced = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 };
const runner = client.chat.completions.stream({ ...asked, ...forced });
const called = (await runner.finalChatCompletion()).choices[0];

const embedded = await client.embeddings.create({ model: "echo", input: ["ab", "abc"] });
const response = await client.responses.create({ model: "echo", input: "abc", max_output_tokens: 16 });
const next = client.responses.stream({ model: "echo", input: "x", previous_response_id: response.id, max_output_tokens: 16 });
const then = await next.finalResponse();

const refused = await client.chat.completions.create({ ...asked, model: "gpt-9" }).catch((error) => error);
const models = [];
for await (const model of client.models.list()) models.push(model.id);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usage: usage.completion_tokens,
    called: called.message.tool_calls[0].function,
    reason: called.finish_reason,
    embedded: embedded.data.map((row) => row.embedding),
    response: response.output_text,
    then: then.output_text,
    refused: { name: refused.constructor.name, status: refused.status, code: refused.code },
    models,
  }),
);
