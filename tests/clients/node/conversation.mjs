// The official npm client in a scripted conversation with a server: node conversation.mjs http://127.0.0.1:8000
// Every step prints its name; the first that goes wrong ends it with an error.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const messages = [
  { role: "system", content: "Answer as a sailor of the old days would, and be brief about it." },
  { role: "user", content: "What is the wind doing today?" },
];

const steps = {
  async models() {
    const found = [];
    for await (const each of client.models.list()) found.push(each.id);
    assert.deepEqual(found, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "two turns"() {
    const greedy = { model, temperature: 0, max_completion_tokens: 16 };
    const first = await client.chat.completions.create({ ...greedy, messages });
    const turns = [...messages, first.choices[0].message, { role: "user", content: "And tomorrow?" }];
    const second = await client.chat.completions.create({ ...greedy, messages: turns });
    assert(second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens);
  },

  async "chat as a stream"() {
    const body = { model, messages, temperature: 0, max_completion_tokens: 16 };
    const whole = await client.chat.completions.create(body);
    const stream = await client.chat.completions.create({
      ...body, stream: true, stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async "several choices, with logprobs"() {
    const answer = await client.chat.completions.create({
      model, messages, n: 2, seed: 1, max_completion_tokens: 3, logprobs: true, top_logprobs: 2,
    });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    for (const choice of answer.choices)
      for (const token of choice.logprobs.content) assert.equal(token.top_logprobs.length, 2);
  },

  async completions() {
    const body = { model, prompt: "Ahoy", max_tokens: 8, temperature: 0 };
    const { text } = (await client.completions.create(body)).choices[0];
    const stop = text.slice(3, 5);
    const stopped = (await client.completions.create({ ...body, stop })).choices[0];
    assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
    assert.equal(stopped.finish_reason, "stop");
    const scored = await client.completions.create({ ...body, max_tokens: 0, echo: true, logprobs: 1 });
    assert.equal(scored.choices[0].text, "Ahoy");
    assert.equal(scored.choices[0].logprobs.token_logprobs[0], null);
  },

  async responses() {
    const body = { model, input: "Land?", temperature: 0, max_output_tokens: 12 };
    const whole = await client.responses.create(body);
    let text = "";
    let last = null;
    for await (const event of await client.responses.create({ ...body, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(text, whole.output_text);
    assert.equal(last.response.status, whole.status);
    assert(last.response.usage.input_tokens_details.cached_tokens > 0);
  },

  async "schemas and tools"() {
    const parameters = {
      type: "object",
      properties: { heading: { enum: ["north", "south"] } },
      required: ["heading"],
      additionalProperties: false,
    };
    const check = (text) => assert(["north", "south"].includes(JSON.parse(text).heading));
    const body = { model, messages, max_completion_tokens: 200 };
    const shaped = await client.chat.completions.create({
      ...body, response_format: { type: "json_schema", json_schema: { name: "course", schema: parameters } },
    });
    check(shaped.choices[0].message.content);
    const tools = [{ type: "function", function: { name: "steer", parameters } }];
    const required = { ...body, tools, tool_choice: "required", parallel_tool_calls: false };
    const called = await client.chat.completions.create(required);
    check(called.choices[0].message.tool_calls[0].function.arguments);
    const streamed = await client.chat.completions.stream(required).finalChatCompletion();
    check(streamed.choices[0].message.tool_calls[0].function.arguments);
  },

  async errors() {
    await assert.rejects(client.models.retrieve("nobody"), OpenAI.NotFoundError);
    const refused = client.chat.completions.create({ model, messages, temperature: -1 });
    await assert.rejects(refused, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  },
};

for (const [name, step] of Object.entries(steps)) {
  await step();
  console.log(name);
}
