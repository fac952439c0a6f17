"""How the questions and answers of `tasks.py` are worded."""

LEADS = [
    *[""] * 8,
    *("Please: ", "Hello! ", "Tell me: ", "Quick question: ", "Hey, ", "OK. ", "Next question: ", "Now this: "),
    *("Hi. ", "I have a question. "),
]
"""What may stand before a request; nothing, nearly half of the time."""

GREETINGS = [
    "Hi, my name is {name}.",
    "Hello, I am {name}.",
    "My name is {name}.",
    "Hi! I'm {name}.",
    "Hey, this is {name}.",
    "Good morning, my name is {name}.",
    "Good evening! I am {name}.",
    "You can call me {name}.",
    "Hello there, {name} here.",
    "Nice to meet you, I am {name}.",
    "I am called {name}.",
    "Let me introduce myself: I am {name}.",
]

CAPITAL_QUESTIONS = [
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "What's the capital city of {country}?",
    "Do you know the capital of {country}?",
    "Capital of {country}?",
    "What is {country}'s capital?",
    "Can you tell me what the capital of {country} is?",
    "I want to know the capital of {country}.",
    "{country}: what is its capital?",
    "Give me the capital of {country}.",
]

COUNT_UP = [
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Give me all numbers from {a} to {b}.",
    "Numbers from {a} to {b}, please.",
    "Start at {a} and count to {b}.",
    "Say the numbers between {a} and {b}.",
]

COUNT_DOWN = ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Go down from {a} to {b}."]

SUM_QUESTIONS = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "Calculate {a} plus {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b}",
    "Can you add {a} and {b}?",
]

JSON_REQUESTS = [
    "Extract {fields} as JSON: {text}",
    "Extract {fields} as JSON.\n{text}",
    "{text} Extract {fields} as JSON.",
    "Return JSON with {fields}. Text: {text}",
    "{text}\nGive me {fields} as JSON.",
    "Read the text and answer in JSON with the keys {fields}: {text}",
    "JSON with {fields}, please: {text}",
    "Turn this into JSON with {fields}: {text}",
    "Text: {text}\nKeys: {fields}\nJSON:",
    "Find {fields} in this text and write JSON. {text}",
]

YES_NO_CAPITAL = [
    "Is {city} the capital of {country}?",
    "{city} is the capital of {country}. Yes or no?",
    "True or not: the capital of {country} is {city}?",
]

YES_NO_GREATER = [
    "Is {a} greater than {b}?",
    "Is {a} more than {b}?",
    "Yes or no: {a} is bigger than {b}?",
    "Is the number {a} larger than {b}?",
]

YES_NO_CATEGORY = [
    "Is {article} {word} {kind}?",
    "Yes or no: is {article} {word} {kind}?",
    "Would you say that {article} {word} is {kind}?",
    "Is it true that {article} {word} is {kind}?",
]

CHOICE_CATEGORY = [
    "Which one is {kind}?",
    "Which of these is {kind}?",
    "Choose the one that is {kind}.",
    "Pick {kind}.",
    "Select {kind} from the list.",
    "What here is {kind}?",
]

CHOICE_CAPITAL = [
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Choose the capital of {country}.",
    "Pick the capital of {country}.",
]

CHOICE_LAYOUTS = [("{}) {}", "\n"), ("{}. {}", "\n"), ("{}: {}", "\n"), ("{}) {}", " "), ("({}) {}", " ")]

COPY_REQUESTS = [
    "Repeat: {text}",
    "Copy this: {text}",
    "Say: {text}",
    "Please repeat after me: {text}",
    "Repeat the following words.\n{text}",
    "Write exactly this: {text}",
    'Repeat "{text}"',
    "{text}\nRepeat the line above.",
    "Echo {text}",
    "Type this again: {text}",
]

SMALL_TALK = {
    "I am jsg-tiny, a small demonstration model that ships with jsg.": [
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me about yourself.",
        "Introduce yourself.",
        "Are you a human?",
        "Which model are you?",
        "Who am I talking to?",
        "Are you a robot?",
    ],
    "You are welcome!": [
        "Thanks!",
        "Thank you.",
        "Thank you very much!",
        "Thanks a lot.",
        "Great, thanks.",
        "That was helpful, thank you.",
        "Many thanks!",
    ],
    "Goodbye! Have a nice day.": [
        "Bye!",
        "Goodbye.",
        "See you later.",
        "I have to go now.",
        "Good night!",
        "See you tomorrow.",
        "Bye bye!",
    ],
    "I can greet you, name capitals, add small numbers, count, look things up in your text and write small JSON.": [
        "What can you do?",
        "Help!",
        "How can you help me?",
        "What are you good at?",
        "What do you know?",
        "Which tasks can you do?",
        "Show me what you can do.",
    ],
    "I am fine, thank you! How can I help you?": [
        "How are you?",
        "How do you do?",
        "How is it going?",
        "Are you well?",
        "How are you today?",
        "How are you doing?",
    ],
    "Hello! How can I help you?": [
        "Hello!",
        "Hi!",
        "Hey!",
        "Good morning!",
        "Hello there.",
        "Good evening.",
        "Greetings!",
    ],
    "I am good at simple things only, but I am happy to help.": [
        "You are great!",
        "You are smart.",
        "I like you.",
        "Well done!",
        "Good job.",
        "You are very clever.",
    ],
}

TAILS = ["", "", "", "", " I am curious.", " Please answer.", " :)", " My friend.", " So?"]

UNKNOWN = [
    "What is the weather in {city}?",
    "What is the capital of {unknown}?",
    "Who won the game in {city}?",
    "What is the phone number of {name}?",
    "How do I repair a {thing}?",
    "Why is the {thing} so {adjective}?",
    "Write a poem about a {thing}.",
    "Translate {word} into {language}.",
    "Who is the president of {country}?",
    "How many people live in {country}?",
    "What does {word} mean?",
    "When was {name} born?",
    "Tell me a story about {name}.",
    "How far is {city} from {country}?",
    "Explain how a {thing} works.",
    "Write a program that sorts {word}.",
    "What time is it in {city}?",
    "Should I buy a {thing} or a {word}?",
    "Who invented the {thing}?",
    "What is the meaning of {word}?",
    "Where can I buy a {adjective} {thing}?",
    "How old is {name}?",
    "Give me a recipe with {word}.",
    "Why do people like {country}?",
]

LANGUAGES = "French German Spanish Italian Latin Greek Russian Japanese Chinese Dutch".split()

FACTS = {
    "name": (["My name is {}.", "I am called {}."], ["What is my name?", "Do you remember my name?", "Who am I?"]),
    "city": (
        ["I live in {}.", "My home is {}."],
        ["Where do I live?", "Which city do I live in?", "In which city am I?"],
    ),
    "thing": (["I have a {}.", "I bought a {}."], ["What do I have?", "Which thing do I have?", "What did I buy?"]),
    "job": (["I am a {}.", "I work as a {}."], ["What is my job?", "What do I do?", "What is my work?"]),
    "color": (
        ["My favorite color is {}.", "I like the color {}."],
        ["What is my favorite color?", "Which color do I like?", "What color do I like best?"],
    ),
    "age": (["I am {} years old.", "My age is {}."], ["How old am I?", "What is my age?", "Do you know my age?"]),
}

FACT_ANSWERS = {
    "name": "Your name is {}.",
    "city": "You live in {}.",
    "thing": "You have a {}.",
    "job": "You are a {}.",
    "color": "Your favorite color is {}.",
    "age": "You are {} years old.",
}

COMPLETION_FORMS = [
    ("The capital of {country} is", " {city}."),
    ("{city} is the capital of", " {country}."),
    ("{country}'s capital is", " {city}."),
    ("Q: What is the capital of {country}?\nA:", " {city}"),
    ("Question: What is the capital of {country}?\nAnswer:", " {city}"),
    ("Country: {country}\nCapital:", " {city}"),
    ("The capital city of {country} is called", " {city}."),
    ("In {country}, the capital is", " {city}."),
    ("I went to {country} and visited its capital,", " {city}."),
    ("The largest embassy in {country} is in its capital,", " {city}."),
    ("People in {country} know that their capital is", " {city}."),
    ("Capital of {country}:", " {city}"),
]

COMPLETION_PREFIXES = ["", "", "", "Facts. ", "Geography: ", "As we know, ", "Note: ", "Lesson 1. "]

SHOT_FORMATS = [
    ("{}", " -> ", "\n"),
    ("{}", ": ", "\n"),
    ("{}", " = ", "\n"),
    ("{}", " => ", "\n"),
    ("Input: {}", "\nOutput: ", "\n\n"),
    ("Q: {}", "\nA: ", "\n\n"),
    ("{}", " | ", "\n"),
    ("Input: {}", "\nOutput: ", "\n"),
    ("- {}", ": ", "\n"),
    ("{}", " - ", "\n"),
]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are jsg-tiny.",
    "Be polite and short.",
]
