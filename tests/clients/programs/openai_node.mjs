// OpenAI's own client for Node: chats, streams, tools, schemas, completions, responses, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { add, BASE_URL, checkWeather, HUB_ID, MODEL, WEATHER, write } from "./told.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "any", maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: "Why is the sky blue?" }], seed: 1 };
const tool = { type: "function", function: { name: "weather", description: "Weather.", parameters: WEATHER } };
const schema = { type: "json_schema", json_schema: { name: "weather", schema: WEATHER, strict: true } };

const names = [];
for await (const model of client.models.list()) names.push(model.id);
assert.deepEqual(names, [MODEL, HUB_ID]);

const whole = await client.chat.completions.create({ ...asked, max_tokens: 24 });
add(whole.usage.completion_tokens);
let text = "";
const stream = await client.chat.completions.create({
  ...asked,
  max_tokens: 24,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) add(chunk.usage.completion_tokens);
}
assert.equal(text, whole.choices[0].message.content);

const forced = { ...asked, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
const called = await client.chat.completions.create(forced);
const [call] = called.choices[0].message.tool_calls;
checkWeather(JSON.parse(call.function.arguments));
add(called.usage.completion_tokens);
const streamed = await client.chat.completions
  .stream({ ...forced, stream_options: { include_usage: true } })
  .finalChatCompletion();
assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
add(streamed.usage.completion_tokens);

const bound = await client.chat.completions.parse({ ...asked, response_format: schema, max_tokens: 200 });
checkWeather(bound.choices[0].message.parsed ?? JSON.parse(bound.choices[0].message.content));
add(bound.usage.completion_tokens);

const completion = await client.completions.create({ model: MODEL, prompt: "Once", max_tokens: 8, logprobs: 2 });
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);
add(completion.usage.completion_tokens);

const response = await client.responses.create({ model: MODEL, input: "Hello.", max_output_tokens: 16 });
assert.ok(response.output_text.length > 0);
add(response.usage.output_tokens);

await assert.rejects(
  client.chat.completions.create({ ...asked, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.message.includes("temperature"),
);
const ended = new AbortController();
const cut = await client.chat.completions.create(
  { ...asked, max_tokens: 2000, stream: true, ignore_eos: true },
  { signal: ended.signal },
);
for await (const _chunk of cut) ended.abort();
write();
