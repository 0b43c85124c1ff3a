// Continues a text with llama.cpp, greedily: node continue.mjs FILE.gguf COUNT TEXT
// Prints one JSON object: the tokens that it reads of the text, whether it puts a beginning before
// them, those that it adds, their text, and what the file says of ends and chats.
import {getLlama} from "node-llama-cpp";

const [file, count, text] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 64});
const {bos, eos, shouldPrependBosToken} = model.tokens;
const begin = shouldPrependBosToken ? [bos] : [];
const read = model.tokenize(text, true);
const added = [];
for await (const token of context.getSequence().evaluate([...begin, ...read], {temperature: 0})) {
    added.push(token);
    if (added.length >= Number(count)) break;
}
const {chat_template: chat = null} = model.fileInfo.metadata.tokenizer;
console.log(JSON.stringify({begin, read, added, text: model.detokenize(added), eos, chat}));
await model.dispose();
process.exit(0);
