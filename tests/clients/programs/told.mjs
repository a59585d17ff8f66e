// What a program tells the test that runs it, as told.py does.
export const BASE_URL = process.env.SEGUE_BASE_URL;
export const MODEL = "smollm2";
export const HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"; // by which it is known too
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 24 },
    unit: { type: "string", enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
};

let answers = 0;
let tokens = 0;

export function add(completionTokens) {
  if (!(completionTokens > 0)) throw new Error(`no tokens: ${completionTokens}`);
  answers += 1;
  tokens += completionTokens;
}

export function checkWeather(read) {
  if (typeof read.city !== "string" || !["celsius", "fahrenheit"].includes(read.unit)) {
    throw new Error(`not what the schema wants: ${JSON.stringify(read)}`);
  }
}

export function write() {
  console.log(JSON.stringify({ answers, completion_tokens: tokens }));
}
