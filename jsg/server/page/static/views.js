// The views of the page, in the order of their tabs. A new view is a module that exports `view`, and a line here.

import { view as cache } from "./cache.js";
import { view as chat } from "./chat.js";
import { view as engine } from "./engine.js";
import { view as programs } from "./programs.js";

export const VIEWS = [chat, cache, programs, engine];
