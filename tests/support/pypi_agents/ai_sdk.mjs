// AI SDK against a gateway: `ai_sdk.mjs anthropic|openai|object TASK`. Its packages are in $AGENTS_NODE.
import { createRequire } from 'node:module'

const { AGENTS_NODE, ANTHROPIC_BASE_URL, OPENAI_API_KEY: apiKey } = process.env
const require = createRequire(`${AGENTS_NODE}/package.json`)
const { generateObject, generateText, stepCountIs, streamText, tool } = require('ai')
const { createAnthropic } = require('@ai-sdk/anthropic')
const { createOpenAI } = require('@ai-sdk/openai')
const { z } = require('zod')

const [kind, task] = process.argv.slice(2)
const create = kind === 'anthropic' ? createAnthropic : createOpenAI
const model = create({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey })('policy')
const inputSchema = z.object({ left: z.number(), right: z.number() })
const execute = ({ left, right }) => String(left + right)
const tools = { add: tool({ description: 'Add two numbers.', inputSchema, execute }) }
const messages = [{ role: 'user', content: task }]
const options = { model, tools, messages, stopWhen: stepCountIs(4) }

if (kind === 'object') {
  const { object } = await generateObject({ model, prompt: task, schema: z.object({ total: z.number() }) })
  console.log(object.total)
} else {
  const first = await generateText(options)
  messages.push(...first.response.messages, { role: 'user', content: 'Sure?' })
  const fail = ({ error }) => { throw error }
  for await (const text of streamText({ ...options, onError: fail }).textStream) process.stdout.write(text)
}
