// The views of the page, in the order of their tabs. A new view is a module that exports `view`, and a line here.

import { view as chat } from "./chat.js";
import { view as engine } from "./engine.js";

export const VIEWS = [chat, engine];
