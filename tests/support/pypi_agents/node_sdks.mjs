// OpenAI's and Anthropic's SDKs for Node against a gateway: `node_sdks.mjs openai|anthropic TASK`.
import { createRequire } from 'node:module'

const require = createRequire(`${process.env.AGENTS_NODE}/package.json`)
const [kind, task] = process.argv.slice(2)
const properties = { left: { type: 'number' }, right: { type: 'number' } }
const schema = { type: 'object', properties }
const add = ({ left, right }) => String(left + right)
const messages = [{ role: 'user', content: task }]

if (kind === 'openai') {
  const OpenAI = require('openai')
  const called = { name: 'add', description: 'Add.', parameters: schema, parse: JSON.parse, function: add }
  const tools = [{ type: 'function', function: called }]
  const runner = new OpenAI().chat.completions.runTools({ model: 'policy', messages, tools, stream: true })
  console.log(await runner.finalContent())
} else {
  const Anthropic = require('@anthropic-ai/sdk')
  const tools = [{ name: 'add', description: 'Add.', input_schema: schema, run: add, parse: (input) => input, type: 'custom' }]
  const runner = new Anthropic().beta.messages.toolRunner({ model: 'policy', max_tokens: 500, messages, tools })
  console.log(JSON.stringify((await runner).content))
}
