// Vercel's AI SDK through its provider for compatible servers: text, a stream, an object, a tool's two turns.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { add, BASE_URL, checkWeather, MODEL, WEATHER, write } from "./told.mjs";

const provider = createOpenAICompatible({
  name: "segue",
  baseURL: BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(MODEL), prompt: "Why is the sky blue?", temperature: 0, maxRetries: 0 };

const whole = await generateText({ ...asked, maxOutputTokens: 24 });
add(whole.usage.outputTokens);
const stream = streamText({ ...asked, maxOutputTokens: 24 });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
add((await stream.usage).outputTokens);

const found = await generateObject({ ...asked, schema: jsonSchema(WEATHER), maxOutputTokens: 200 });
checkWeather(found.object);
add(found.usage.outputTokens);

let calls = 0;
const weather = tool({
  description: "Weather.",
  inputSchema: jsonSchema(WEATHER),
  execute: async (given) => {
    checkWeather(given);
    calls += 1;
    return "rain";
  },
});
const turns = await generateText({
  ...asked,
  tools: { weather },
  maxOutputTokens: 200,
  providerOptions: { segue: { parallel_tool_calls: false } },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
assert.ok(calls > 0);
assert.equal(turns.steps.length, 2);
for (const step of turns.steps) add(step.usage.outputTokens);
write();
