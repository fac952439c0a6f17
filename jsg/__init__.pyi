"""What type checkers see of `jsg`: the names that `__init__.py` loads when they are read."""

from jsg.engine.offline.engine import Engine as Engine
from jsg.lang.branches import ProgramStateGroup as ProgramStateGroup
from jsg.lang.choices import (
    greedy_token_selection as greedy_token_selection,
)
from jsg.lang.choices import (
    token_length_normalized as token_length_normalized,
)
from jsg.lang.choices import (
    token_trie as token_trie,
)
from jsg.lang.choices import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from jsg.lang.control import (
    all_of as all_of,
)
from jsg.lang.control import (
    any_of as any_of,
)
from jsg.lang.control import (
    cond as cond,
)
from jsg.lang.control import (
    contains as contains,
)
from jsg.lang.control import (
    equals as equals,
)
from jsg.lang.control import (
    loop as loop,
)
from jsg.lang.control import (
    matches as matches,
)
from jsg.lang.control import (
    not_ as not_,
)
from jsg.lang.control import (
    unordered as unordered,
)
from jsg.lang.defaults import (
    flush_cache as flush_cache,
)
from jsg.lang.defaults import (
    get_server_info as get_server_info,
)
from jsg.lang.defaults import (
    set_default_backend as set_default_backend,
)
from jsg.lang.function import SglFunction as SglFunction
from jsg.lang.function import function as function
from jsg.lang.gantt import trace_to_html as trace_to_html
from jsg.lang.http.endpoint import RuntimeEndpoint as RuntimeEndpoint
from jsg.lang.http.runtime import Runtime as Runtime
from jsg.lang.patterns import (
    REGEX_BOOL as REGEX_BOOL,
)
from jsg.lang.patterns import (
    REGEX_FLOAT as REGEX_FLOAT,
)
from jsg.lang.patterns import (
    REGEX_INT as REGEX_INT,
)
from jsg.lang.patterns import (
    REGEX_STR as REGEX_STR,
)
from jsg.lang.primitives import (
    assistant as assistant,
)
from jsg.lang.primitives import (
    assistant_begin as assistant_begin,
)
from jsg.lang.primitives import (
    assistant_end as assistant_end,
)
from jsg.lang.primitives import (
    decide as decide,
)
from jsg.lang.primitives import (
    gen as gen,
)
from jsg.lang.primitives import (
    gen_int as gen_int,
)
from jsg.lang.primitives import (
    gen_string as gen_string,
)
from jsg.lang.primitives import (
    image as image,
)
from jsg.lang.primitives import (
    select as select,
)
from jsg.lang.primitives import (
    separate_reasoning as separate_reasoning,
)
from jsg.lang.primitives import (
    system as system,
)
from jsg.lang.primitives import (
    system_begin as system_begin,
)
from jsg.lang.primitives import (
    system_end as system_end,
)
from jsg.lang.primitives import (
    user as user,
)
from jsg.lang.primitives import (
    user_begin as user_begin,
)
from jsg.lang.primitives import (
    user_end as user_end,
)
from jsg.lang.primitives import (
    video as video,
)
from jsg.lang.remote.anthropic import Anthropic as Anthropic
from jsg.lang.remote.openai import OpenAI as OpenAI
from jsg.lang.state import ProgramState as ProgramState
from jsg.types import SamplingParams as SamplingParams

__version__: str
