"""What type checkers see of `jsg`: the names that `__init__.py` loads when they are read."""

from jsg.engine.offline.engine import Engine as Engine
from jsg.lang.program.branches import ProgramStateGroup as ProgramStateGroup
from jsg.lang.tokens.choices import (
    greedy_token_selection as greedy_token_selection,
    token_length_normalized as token_length_normalized,
    token_trie as token_trie,
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from jsg.lang.control import (
    all_of as all_of,
    any_of as any_of,
    cond as cond,
    contains as contains,
    equals as equals,
    loop as loop,
    matches as matches,
    not_ as not_,
    unordered as unordered,
)
from jsg.lang.program.defaults import (
    flush_cache as flush_cache,
    get_server_info as get_server_info,
    set_default_backend as set_default_backend,
)
from jsg.lang.executor.compiled import CompiledFunction as CompiledFunction
from jsg.lang.function import SglFunction as SglFunction, function as function
from jsg.lang.program.gantt import trace_to_html as trace_to_html
from jsg.lang.http.endpoint import RuntimeEndpoint as RuntimeEndpoint
from jsg.lang.http.runtime import Runtime as Runtime
from jsg.lang.words.patterns import (
    REGEX_BOOL as REGEX_BOOL,
    REGEX_FLOAT as REGEX_FLOAT,
    REGEX_INT as REGEX_INT,
    REGEX_STR as REGEX_STR,
)
from jsg.lang.program.primitives import (
    assistant as assistant,
    assistant_begin as assistant_begin,
    assistant_end as assistant_end,
    decide as decide,
    gen as gen,
    gen_int as gen_int,
    gen_string as gen_string,
    image as image,
    select as select,
    separate_reasoning as separate_reasoning,
    system as system,
    system_begin as system_begin,
    system_end as system_end,
    user as user,
    user_begin as user_begin,
    user_end as user_end,
    video as video,
)
from jsg.lang.remote.anthropic import Anthropic as Anthropic
from jsg.lang.remote.openai import OpenAI as OpenAI
from jsg.lang.program.state import ProgramState as ProgramState
from jsg.types import SamplingParams as SamplingParams

__version__: str
