"""Programs as they are written for the published language: of jsg they know its name in the imports, and no more.

Each has the structure of a published benchmark or example: its calls in their order, its forks and joins, where its
values are read. The texts are ours. `test_ported_programs.py` runs them.
"""

import jsg as sgl
from jsg.lang.words.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR

# One call behind examples


@sgl.function
def few_shot_mmlu(s, examples, question):
    s += examples + question
    s += sgl.gen("answer")


@sgl.function
def few_shot_hellaswag(s, examples, question, choices):
    s += examples + question
    s += sgl.select("answer", choices=choices)


@sgl.function
def few_shot_gsm8k(s, examples, question):
    s += examples + question
    s += sgl.gen("answer", max_tokens=512, stop=["Question", "Assistant:", "<|separator|>"])


# An agent whose steps were recorded


@sgl.function
def webthink(s, question, triplets):
    s += "Answer by thoughts, actions and observations.\n" + question + "\n"
    for i in range(1, len(triplets) + 2):
        s += "Thought " + str(i) + ":"
        branch = s.fork(1)
        branch[0] += sgl.gen(name="thought_action", max_tokens=200, stop="Observation")
        branch.join()
        if i > len(triplets):
            break
        s += triplets[i - 1]["thought"] + "\nAction " + str(i) + ":" + triplets[i - 1]["action"] + "\n"
        s += "Observation " + str(i) + ":" + triplets[i - 1]["observation"] + "\n"


# Five functions of an agent that live one after another


@sgl.function
def poignancy_event(s, persona_name, persona_iss, event):
    s += "This is who " + persona_name + " is:\n" + persona_iss + "\n"
    s += "From 1 to 10, how much does it matter to " + persona_name + "?\n"
    s += "Event: " + event + "\nRate:"
    s += sgl.gen(name="Rate", max_tokens=2)


@sgl.function
def generate_event_triple(s, persona_name, action):
    s += "Make a triple (subject, predicate, object) of each sentence.\n"
    s += persona_name + " is " + action + ".\n(" + persona_name + ","
    s += sgl.gen(name="Triple", max_tokens=20, stop=")")


@sgl.function
def generate_pronunciatio(s, action):
    s += "Write an action as two emoji.\n"
    s += "Action: " + action + ".\nEmoji:"
    s += sgl.gen(name="Emoji", max_tokens=6)


@sgl.function
def action_location_sector(s, persona_name, sectors, current_action):
    s += f"{persona_name} may go to one of: {sectors}.\n"
    s += f"To do this: {current_action}, {persona_name} goes to: {{"
    s += sgl.gen(name="Location", max_tokens=10, stop="}")


@sgl.function
def action_location_object(s, persona_name, objects, current_action):
    s += f"Around {persona_name} there are: {objects}.\n"
    s += f"For this: {current_action}, {persona_name} uses: {{"
    s += sgl.gen(name="Object", max_tokens=5, stop="}")


# Trees of thought


def propose_plan(s, question, num_branches, max_tokens):
    s += sgl.user("Write a plan to answer the question. Do not answer it yet.\n" + question)
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=max_tokens))
    return forks


def execute_plan(s, num_branches, max_tokens):
    s += sgl.user("The plan looks good. Carry it out and find the answer.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=max_tokens))
    return forks


def reflect_solution(s, num_branches, max_tokens):
    s += sgl.user("Go through your answer again. Is it right? Give it a score.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("score", max_tokens=max_tokens))
    return forks


def get_final_answer(s, num_branches, max_tokens):
    s += sgl.user("Now write the final answer, and no more.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("final_answer", max_tokens=max_tokens))
    return forks


@sgl.function
def tree_search_deep(s, question, num_branches, max_tokens=256):
    """Never joined: what the leaves say is returned."""
    plan_forks = propose_plan(s, question, num_branches, max_tokens)

    sol_states = []
    for plan in plan_forks:
        sol_states.extend(execute_plan(plan, num_branches, max_tokens))

    ref_states = []
    for sol in sol_states:
        ref_states.extend(reflect_solution(sol, num_branches, max_tokens))

    solutions = []
    for ref in ref_states:
        solutions.append(get_final_answer(ref, num_branches, max_tokens))
    return [[leaf.text() for leaf in forks] for forks in solutions]


@sgl.function
def tree_search_v0(s, question, num_branches, max_tokens=256):
    """Joined from the leaves to the root, whose variables become lists of lists."""
    forks_to_join = []

    plan_forks = propose_plan(s, question, num_branches, max_tokens)
    forks_to_join.append(plan_forks)

    sol_states = []
    for plan in plan_forks:
        forks = execute_plan(plan, num_branches, max_tokens)
        forks_to_join.append(forks)
        sol_states.extend(forks)

    for sol in sol_states:
        forks = reflect_solution(sol, num_branches, max_tokens)
        forks_to_join.append(forks)

    for forks in reversed(forks_to_join):
        forks.join()


# Branches that are merged

DIMENSIONS = [
    "Clarity: is it easy to follow?",
    "Originality: has it thoughts of its own?",
    "Evidence: are its claims supported?",
    "Structure: is there an order in it?",
    "Tone: does it suit its readers?",
    "Length: is it as long as it has to be?",
]


@sgl.function
def multi_dimension_judge(s, article):
    s += "You judge articles.\n"
    s += "\n```\n" + article + "\n```\n\n"
    forks = s.fork(len(DIMENSIONS))
    for i in range(len(DIMENSIONS)):
        forks[i] += "USER: Judge it by this.\n" + DIMENSIONS[i] + " End with END.\nASSISTANT:"
        forks[i] += sgl.gen("judgment", max_tokens=256, stop="END")
    forks.join()

    s += "What was said:\n"
    for i in range(len(DIMENSIONS)):
        s += DIMENSIONS[i].split(":")[0] + ": " + forks[i]["judgment"].strip() + "\n"
    s += "All in all, from 1 to 10, I give it a"
    s += sgl.gen("score", max_tokens=2)


WAYS = [" First,", " Step by step:", " Backwards:", " By numbers:", " In other words:"]


@sgl.function
def multi_chain_gsm8k(s, question):
    s += "Question: " + question + "\n"
    forks = s.fork(len(WAYS))
    for i in range(len(WAYS)):
        forks[i] += "Answer:" + WAYS[i]
        forks[i] += sgl.gen("chain", max_tokens=256, temperature=0.3, stop="Question")
    forks.join()

    s += "Several answers:\n"
    for i in range(len(WAYS)):
        s += str(i + 1) + "." + WAYS[i] + forks[i]["chain"].strip() + "\n"
    s += "So the answer is"
    s += sgl.gen("answer", max_tokens=16)


@sgl.function
def parallel_sample(s, question, n):
    s += "Question: Which is larger, 3 or 4?\nReasoning: Four is larger.\nTool: browser\n"
    s += "Question: " + question + "\n"
    forks = s.fork(n)
    forks += "Reasoning:" + sgl.gen("reasoning", stop="\n") + "\n"
    forks += "Tool:" + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
    forks.join()


# Programs that call programs

NUM_TIPS = 5


@sgl.function
def expand_tip(s, topic, tip):
    s += "Write a tip out, in a paragraph.\n"
    s += "Topic: sleep\nTip: No light\nParagraph: Light keeps you awake.\n\n"
    s += "Topic: " + topic + "\nTip: " + tip + "\nParagraph:"
    s += sgl.gen("paragraph", max_tokens=128, stop=["\n\n"])


@sgl.function
def suggest_tips(s, topic):
    s += "You give short tips.\n"
    s += "USER: Some tips on " + topic + ".\nASSISTANT: Here are five:\n"
    paragraphs = []
    for i in range(1, NUM_TIPS + 1):
        s += f"{i}." + sgl.gen(f"tip_{i}", max_tokens=24, stop=[".", "\n"]) + ".\n"
        paragraphs.append(expand_tip(topic=topic, tip=s[f"tip_{i}"]))
    for i in range(1, NUM_TIPS + 1):
        s += f"Tip {i}:" + paragraphs[i - 1]["paragraph"] + "\n"


# Answers that match a form

CHARACTER_REGEX = (
    r"""\{\n"""
    + r"""    "name": "[\w\d\s]{1,16}",\n"""
    + r"""    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n"""
    + r"""    "alive": "(Alive|Deceased)",\n"""
    + r"""    "wand": \{\n"""
    + r"""        "wood": "[\w\d\s]{1,16}",\n"""
    + r"""        "length": [0-9]{1,2}\.[0-9]{0,2}\n"""
    + r"""    \}\n"""
    + r"""\}"""
)


@sgl.function
def character_gen(s, name):
    s += name + " is somebody in a book. What is known of them:\n"
    s += sgl.gen("json_output", max_tokens=256, regex=CHARACTER_REGEX)


@sgl.function
def json_decode(s, document):
    s += "Take the facts of a city out of a page.\nPage begin.\n" + document + "\nPage end.\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen("name", max_tokens=8, regex=REGEX_STR) + ",\n"
        s += '  "population": ' + sgl.gen("population", max_tokens=8, regex=REGEX_INT, stop=[" ", "\n"]) + ",\n"
        s += '  "area": ' + sgl.gen("area", max_tokens=8, regex=REGEX_INT, stop=[" ", "\n"]) + ",\n"
        s += '  "latitude": ' + sgl.gen("latitude", max_tokens=8, regex=REGEX_FLOAT, stop=[" ", "\n"]) + ",\n"
        s += '  "country": ' + sgl.gen("country", max_tokens=24, regex=REGEX_STR) + "\n"
        s += "}"


@sgl.function
def long_json_decode(s, document):
    s += "Take the facts of a country out of a long page.\nPage begin.\n" + document + "\nPage end.\n"
    s += "{\n"
    s += '  "name": "' + sgl.gen("name", max_tokens=8, stop='"') + '",\n'
    s += '  "capital": "' + sgl.gen("capital", max_tokens=8, stop='"') + '",\n'
    s += '  "language": "' + sgl.gen("language", max_tokens=8, stop='"') + '",\n'
    s += '  "currency": "' + sgl.gen("currency", max_tokens=24, stop='"') + '"\n'
    s += "}"


# Documents side by side


@sgl.function
def line_retrieval(s, prefix, suffix, body_0, body_1, body_2, body_3):
    s += prefix + "\n"
    contexts = [body_0, body_1, body_2, body_3]
    position_ids_offset = [i * 1000 for i in range(len(contexts))]
    forks = s.fork(len(contexts), position_ids_offset)
    forks += lambda i: contexts[i] + "\n"
    forks.join(mode="concate_and_append")
    s += "\n" + suffix
    s += sgl.gen("answer", max_tokens=16)


@sgl.function
def multi_document_qa(s, docs, question):
    s += sgl.user_begin()
    s += "Remember this:"
    forks = s.fork(len(docs))
    forks += lambda i: docs[i]
    forks.join("concate_and_append")
    s += " " + question
    s += sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=16))


# Conversations


@sgl.function
def multi_turns(s, qas):
    for qa in qas:
        s += qa["prompt"]
        s += sgl.gen(max_tokens=qa["new_tokens"], ignore_eos=True)


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=256))
    s += sgl.user(question_2)
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=256)


@sgl.function
def tool_use(s, question):
    s += "To answer this question: " + question + ". "
    s += "I need a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The expression is" + sgl.gen("expression")
    elif s["tool"] == "search engine":
        s += "The words to search for are" + sgl.gen("word")


# Pictures


@sgl.function
def image_qa(s, image_file, question):
    s += sgl.user(sgl.image(image_file) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=768))
