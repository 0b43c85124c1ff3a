// Continues a text with llama.cpp, greedily: node continue.mjs FILE.gguf COUNT TEXT
// Prints one JSON object: the tokens that it reads of the text, and those that it adds.
import {getLlama} from "node-llama-cpp";

const [file, count, text] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 64});
const read = model.tokenize(text);
const added = [];
for await (const token of context.getSequence().evaluate(read, {temperature: 0})) {
    added.push(token);
    if (added.length >= Number(count)) break;
}
console.log(JSON.stringify({read, added}));
await model.dispose();
process.exit(0);
