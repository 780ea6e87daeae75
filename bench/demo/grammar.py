"""Hand-written word lists and sentence templates of the demo model's little language.

Data only: `bench.demo.writer` draws from it, `bench.demo.checker` checks sentences against it. Everything the
assistant may ever say is spelled here, so a sentence that no template here produces is a mistake of the model.
Templates use `{v}` for the value of a fact (always after a space, so that it has the same tokens wherever it
stands), `{p}` for a person's name, and `{N}`, `{M}` for the heroes of a story.
"""

from typing import NamedTuple


class Attribute(NamedTuple):
    """One thing that can be told, corrected and asked for."""

    key: str
    values: str  # the kind of value, see `VALUE_WORDS` and `bench.demo.values`
    clauses: tuple[str, ...]  # as the speaker says it
    questions: tuple[str, ...]
    indirect: str
    answer: str  # as the assistant takes note of it and repeats it
    third_person: str | None = None  # how a system prompt says it of the user


class Story(NamedTuple):
    """Parts that differ between stories."""

    hero: str  # the usual name
    friend: str
    friend_name: str
    home: str
    find: str


# fmt: off
# The lists below are set by hand: one item a line would bury the language in brackets.


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


ANIMALS = words("cat dog parrot horse rabbit hamster turtle goat duck donkey pony goldfish")
RELATIVES = words("brother sister mother father friend neighbour teacher boss cousin aunt uncle daughter son "
                  "wife husband")
NUMBERS = phrases("lucky number, door code, room number, locker number, house number, ticket number, seat "
                  "number, phone number, PIN, order number, favourite number, badge number")
SECRETS = phrases("password, code word, user name, licence plate, secret word")
COUNTED = words("apples books coins stamps chairs boats lamps keys plants shells marbles candles spoons hats")
COLOURED = words("bicycle car house hat coat bag door boat umbrella scarf")
FAVOURITES = {
    "colour": "colour",
    "food": "food",
    "fruit": "fruit",
    "drink": "drink",
    "animal": "animal",
    "song": "title",
    "book": "title",
    "flower": "flower",
    "game": "game",
    "day": "day",
    "city": "city",
    "word": "code",
}
STAFF = words("manager cook guard driver gardener doctor captain librarian")
PLACES = words("shop office museum library bakery school station pool")
OBJECTS = words("key letter map lantern ladder parcel medal flute")

VALUE_WORDS = {
    "name": words("Anna Tom Maria Ben Clara Leo Nina Paul Emma Max Julia Felix Sara Noah Ida Oscar Eva Hugo "
                  "Lena Karl Alice Bob Carol David Milo Nori Rex Luna Bella Rocky Daisy Coco Simba Nala Buddy "
                  "Oliver Zoe James John Peter Laura Lisa Mark Lucas Sophie Simon Martin Helen Ruby Jack Harry "
                  "Grace Lucy Ella Mia Adam Robin Sam Kim Alex Chris Kate Jane Mary Susan Linda George Henry "
                  "Frank Tim Nora Amy Lily Charlie Molly Bruno Fritz Otto Whiskers Mittens Shadow Lucky Tiger "
                  "Snowy"),
    "city": words("Berlin Paris London Rome Madrid Vienna Oslo Prague Lisbon Dublin Athens Tokyo Boston Chicago"
                  " Lima Cairo Delhi Sydney Toronto Hamburg Zurich Geneva Warsaw Seoul Munich Milan Venice "
                  "Naples Porto Bonn Cologne Leeds York Oxford Dallas Denver Seattle Miami Havana Bergen Turin "
                  "Lyon Nice Kyoto"),
    "colour": words("red blue green yellow black white orange purple pink brown grey teal violet turquoise "
                    "crimson golden silver amber indigo olive"),
    "food": words("pizza pasta soup bread rice cheese salad noodles pancakes curry porridge stew sushi tacos "
                  "dumplings"),
    "fruit": words("apples pears plums cherries grapes mangoes lemons oranges figs peaches bananas kiwis melons"),
    "drink": words("tea coffee milk water juice cocoa lemonade cider"),
    "animal": words("fox owl bear wolf otter badger heron whale tiger lion panda eagle koala penguin"),
    "flower": words("roses tulips daisies lilies poppies violets orchids"),
    "game": words("chess cards tennis football darts golf hockey dominoes"),
    "day": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "job": words("baker painter doctor teacher driver pilot gardener tailor farmer nurse singer carpenter "
                 "plumber writer sailor cook lawyer judge barber florist"),
}
SHADES = words("dark light pale bright deep")
SPOTS = words("box drawer bag cupboard basket chest garden cellar kitchen tower")
TITLE_ADJECTIVES = words("Silent Golden Broken Little Distant Hidden Frozen Crooked Wild Last")
TITLE_NOUNS = words("River Garden Mirror Harbour Forest Candle Bridge Winter Window Kingdom")
ONSETS = words("b d f g h j k l m n p r s t v w z br dr kr tr st th sh bl fl gr pl sk")
VOWELS = words("a e i o u a e i o ai ia ou")
CODAS = words("n r l s m x k t nd rn th")
CITY_ENDS = words("burg ton ville stad mora ford wick dale haven grad mouth holm")


def fact(  # noqa: PLR0917  a row of the tables below
    key: str, values: str, told: str, asked: str, indirect: str, answer: str, third: str | None = None
) -> Attribute:
    """An attribute; clauses and questions are separated by bars."""
    return Attribute(key, values, tuple(told.split("|")), tuple(asked.split("|")), indirect, answer, third)


ATTRIBUTES: list[Attribute] = [
    fact("name", "name", "my name is {v}|I am {v}|I am called {v}|people call me {v}|I'm {v}",
         "What is my name?|Who am I?|What am I called?|What's my name?|Do you know my name?", "my name",
         "Your name is {v}.", "the user is called {v}"),
    fact("city", "city", "I live in {v}|my home is in {v}|I moved to {v}|I come from {v}",
         "Where do I live?|Which city do I live in?|What city do I live in?|Where is my home?", "where I live",
         "You live in {v}.", "the user lives in {v}"),
    fact("born", "city", "I was born in {v}", "Where was I born?|In which city was I born?", "where I was born",
         "You were born in {v}.", "the user was born in {v}"),
    fact("job", "job", "I work as a {v}|my job is that of a {v}|I am working as a {v}",
         "What is my job?|What do I do for a living?|What do I work as?", "what my job is",
         "You work as a {v}.", "the user works as a {v}"),
    fact("age", "age", "I am {v} years old|my age is {v}|I'm {v} years old", "How old am I?|What is my age?",
         "how old I am", "You are {v} years old.", "the user is {v} years old"),
    fact("self", "name", "your name is {v}|you are {v}|I will call you {v}|you are called {v}",
         "What is your name?|Who are you?|What are you called?|What's your name?", "your name",
         "My name is {v}."),
    *(fact(f"pet {a}", "name", f"my {a} is called {{v}}|I have a {a} called {{v}}|I have a {a} named {{v}}"
           f"|the name of my {a} is {{v}}|my {a}'s name is {{v}}|my {a} is named {{v}}",
           f"What is my {a} called?|What is the name of my {a}?|What's my {a}'s name?|What is my {a}'s name?"
           f"|How did I name my {a}?", f"what my {a} is called",
           f"Your {a} is called {{v}}.", f"the user's {a} is called {{v}}") for a in ANIMALS),
    *(fact(f"relative {r}", "name", f"my {r} is called {{v}}|my {r}'s name is {{v}}|the name of my {r} is {{v}}",
           f"What is my {r} called?|What is my {r}'s name?|What is the name of my {r}?", f"what my {r} is called",
           f"Your {r} is called {{v}}.", f"the user's {r} is called {{v}}") for r in RELATIVES),
    *(fact(f"home of {r}", "city", f"my {r} lives in {{v}}|my {r} moved to {{v}}",
           f"Where does my {r} live?|Which city does my {r} live in?", f"where my {r} lives",
           f"Your {r} lives in {{v}}.", f"the user's {r} lives in {{v}}") for r in RELATIVES),
    *(fact(f"favourite {f}", kind, f"my favourite {f} is {{v}}|the {f} I like most is {{v}}",
           f"What is my favourite {f}?|Which {f} do I like most?|What's my favourite {f}?", f"my favourite {f}",
           f"Your favourite {f} is {{v}}.", f"the user's favourite {f} is {{v}}")
      for f, kind in FAVOURITES.items()),
    *(fact(f"my {n}", kind, f"my {n} is {{v}}|the {n} I have is {{v}}", f"What is my {n}?|What's my {n}?",
           f"my {n}", f"Your {n} is {{v}}.", f"the user's {n} is {{v}}")
      for kind, names in (("number", NUMBERS), ("code", SECRETS)) for n in names),
    *(fact(f"count {c}", "age", f"I have {{v}} {c}|there are {{v}} {c} in my room",
           f"How many {c} do I have?|How many {c} are mine?", f"how many {c} I have",
           f"As for {c}, you have {{v}}.", f"the user has {{v}} {c}") for c in COUNTED),
    *(fact(f"colour of {c}", "colour", f"my {c} is {{v}}|the colour of my {c} is {{v}}",
           f"What colour is my {c}?|What is the colour of my {c}?", f"the colour of my {c}",
           f"Your {c} is {{v}}.", f"the user's {c} is {{v}}") for c in COLOURED),
]
WORLD: list[Attribute] = [
    *(fact(f"the {s}", "name", f"the {s} is called {{v}}|the name of the {s} is {{v}}",
           f"What is the {s} called?|What is the name of the {s}?", f"what the {s} is called",
           f"The {s} is called {{v}}.") for s in STAFF),
    *(fact(f"{p} {verb}", "time", f"the {p} {verb}s at {{v}}",
           f"When does the {p} {verb}?|At what time does the {p} {verb}?", f"when the {p} {verb}s",
           f"The {p} {verb}s at {{v}}.") for p in PLACES for verb in ("open", "close")),
    *(fact(f"place of {p}", "city", f"the {p} is in {{v}}", f"Where is the {p}?|In which city is the {p}?",
           f"where the {p} is", f"The {p} is in {{v}}.") for p in PLACES),
    *(fact(f"spot of {o}", "spot", f"the {o} is in {{v}}|I put the {o} in {{v}}",
           f"Where is the {o}?|Where did I put the {o}?", f"where the {o} is", f"The {o} is in {{v}}.")
      for o in OBJECTS),
]
PERSON: list[Attribute] = [
    fact("person city", "city", "{p} lives in {v}|{p} moved to {v}",
         "Where does {p} live?|Which city does {p} live in?", "where {p} lives", "I know that {p} lives in {v}."),
    fact("person job", "job", "{p} works as a {v}", "What is the job of {p}?|What does {p} work as?",
         "what the job of {p} is", "I know that {p} works as a {v}."),
    fact("person age", "age", "{p} is {v} years old", "How old is {p}?", "how old {p} is",
         "I know that {p} is {v} years old."),
    fact("person colour", "colour", "{p} likes the colour {v}",
         "Which colour does {p} like?|What colour does {p} like?", "which colour {p} likes",
         "I know that {p} likes the colour {v}."),
    fact("person pet", "name", "{p} has a pet called {v}|the pet of {p} is called {v}",
         "What is the pet of {p} called?|What is {p}'s pet called?", "what the pet of {p} is called",
         "I know that {p} has a pet called {v}."),
]


TELL = ("{C}.", "{C}.", "{C}.", "By the way, {c}.", "Please remember that {c}.", "Note that {c}.", "Hi, {c}.",
        "You should know that {c}.", "Remember this: {c}.", "Let me tell you that {c}.")
FIX = ("Actually, {c}, not {old}.", "Actually, {c}.", "Sorry, I made a mistake: {c}.", "No, {c}, not {old}.",
       "That has changed: {c} now.", "Correction: {c}.", "I was wrong, {c}.", "Not {old}. I meant that {c}.")
NOTED = "Okay."
CORRECTED = "Thank you."
ASK = ("{q}", "{q}", "{q}", "{q}", "Do you remember {i}?", "Can you tell me {i}?", "Please tell me {i}.",
       "I forgot {i}.", "Do you know {i}?", "Now tell me: {l}", "One question. {q}", "And {l}", "So, {l}",
       "Quick check: {l}")
UNKNOWN = "You have not told me that yet."

SELF = "I am the llamaslot demo, a very small language model."
CONFUSED = ("I am sorry, I do not understand that. I am a very small model, but you can tell me facts or ask me"
            " for a story.")
HELP = ("You can tell me facts, for example the name of your cat, and ask me for them later. I can also tell "
        "little stories and repeat words.")
CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello", "Hey there!", "Hi there", "Good morning!", "Good evening!", "Greetings!",
      "Hello there!", "Hey", "Good day!", "Say hello.", "hello world", "Hello, world!"),
     "Hello! How can I help you today?"),
    (("How are you?", "How are you doing?", "How do you do?", "Are you well?", "What's up?",
      "Hello, how are you?", "How are you today?", "Hi, how are you?"),
     "I am fine, thank you. How are you?"),
    (("I am fine.", "I'm good, thanks.", "I am fine, thank you.", "Very well, thank you.", "I'm great!",
      "I am happy."),
     "I am glad to hear that."),
    (("I am sad.", "I am tired.", "I had a bad day.", "I'm not well.", "I feel lonely."),
     "I am sorry to hear that. I hope that tomorrow is a better day."),
    (("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much!", "Great, thanks!",
      "Thank you for your help."),
     "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "See you tomorrow.", "I have to go."),
     "Goodbye! I enjoyed talking to you."),
    (("What are you?", "Are you a robot?", "Are you human?", "Are you an AI?", "What model are you?",
      "What is this?", "Tell me about yourself.", "Introduce yourself.", "Who made you?",
      "Which model is this?", "Are you ChatGPT?"),
     SELF),
    (("Help!", "Help me.", "Can you help me?", "What can you do?", "I need help.", "How can you help me?",
      "What should I ask?", "What can I ask you?", "How do you work?", "What are you good at?"),
     HELP),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
     "Why did the duck cross the pond? It wanted to see the other side."),
    (("How is the weather?", "What is the weather like?", "Is it raining?", "Will it rain tomorrow?",
      "Nice weather today."),
     "I cannot see outside, but I hope that the sun is shining."),
    (("What time is it?", "What day is it?", "What is the date today?", "Which year is it?"),
     "I am sorry, I do not have a clock."),
    (("Yes.", "Okay.", "Ok", "Good.", "Sure.", "All right.", "I see.", "Great!", "Nice.", "Cool!", "Fine."),
     "Good. What is next?"),
    (("No.", "No thanks.", "Nothing.", "Never mind.", "Nope"),
     "Okay. I am here if you need me."),
    (("I like you.", "You are nice.", "You are great!", "Good job!", "Well done!", "You are clever."),
     "Thank you, that is very kind of you."),
    (("You are wrong.", "That is wrong.", "That is not true.", "You are stupid.", "That was bad."),
     "I am sorry. Please tell me again how it is."),
    (("Count to five.", "Can you count?", "Count from one to five.", "Please count to five."),
     "One, two, three, four, five."),
    (("Name the days of the week.", "What are the days of the week?", "List the days of the week."),
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (("What is your favourite colour?", "Which colour do you like?", "Do you like blue?"),
     "I like green, because frogs are green."),
    (("Do you like music?", "Can you sing?", "Sing a song for me.", "Sing something."),
     "La la la. That is all I can sing."),
    (("Write a poem.", "Tell me a poem.", "Do you know a poem?", "Write me a short poem."),
     "The moon is bright, the night is deep, the little fox is fast asleep."),
    (("Tell me something interesting.", "Tell me a fact.", "Tell me something.", "Surprise me."),
     "An owl can turn its head almost all the way around."),
    (("Are you there?", "Can you hear me?", "Test", "This is a test.", "Testing, testing.", "ping"),
     "Yes, I am here."),
)

ECHO = ("Say {w}.", "Repeat: {w}", "Please repeat {w}.", "Repeat after me: {w}.", "Can you say {w}?",
        "Please say {w}.")
ECHOED = "You asked me to say {w}."

STORY_ASK = ("Tell me a story.", "Please tell me a story.", "Can you tell me a story?",
             "I would like to hear a story.", "Do you know a story?", "Tell me a little story.",
             "A story, please.", "Write a short story.", "Write a story.")
STORY_ASK_HERO = ("Tell me a story about a {a} called {N}.", "Please tell me a story about a {a} named {N}.",
                  "Write a story about a {a} called {N}.", "I want a story about a {a} called {N}.")
STORY_ASK_ANIMAL = ("Tell me a story about a {a}.", "Can you tell me a story about a {a}?",
                    "Do you know a story about a {a}?")
STORY_TOLD = ("I have a story for you. {s}", "Listen to this. {s}", "Here is my story. {s}")
STORY_THANKS = "Thank you for telling me that story."
STORY_WHO = ("Who was the story about?", "Who was that story about?", "What was the story about?")
STORY_ANSWER = "The story was about a {a} called {N}."
STORIES = {  # by animal; the first is told when no animal is named
    "fox": Story("Pim", "hedgehog", "Tilda", "in a den under an old oak tree", "a golden crown under a stone"),
    "mouse": Story("Lotta", "spider", "Webster",
                   "in a hole behind the kitchen wall", "a red balloon beside the road"),
    "bear": Story("Bruno", "bee", "Zita", "in a warm cave in the mountains", "a broken wheel near the river"),
    "frog": Story("Quill", "heron", "Astor",
                  "at the edge of a quiet pond", "a book without a name in the tall grass"),
    "stork": Story("Minna", "bat", "Nico", "in the tower of an empty church", "a silver bell behind a bush"),
    "squirrel": Story("Hopsa", "mole", "Gustav", "in a field full of clover", "an old clock under a stone"),
    "crow": Story("Corvo", "magpie", "Salome", "on the roof of a tall house", "a music box beside the road"),
    "lynx": Story("Ottilie", "beaver", "Knut", "by a river with clear water", "a lost shoe near the river"),
    "badger": Story("Bela", "sparrow", "Fips", "in a burrow near the village", "a golden ring in the tall grass"),
    "robot": Story("Bolt", "clockmaker", "Agatha", "in a workshop full of tools", "a small hammer behind a bush"),
}

STORY_START = ("Once upon a time there was a {j} {a} called {N}.", "There once was a {j} {a} called {N}.")
STORY_ADJECTIVES = words("little young brave clever curious")
STORY_HOME = "Everybody knew that {N} lived {home}."
STORY_DAY = ("One sunny morning, {N} found {find}.", "One rainy day, {N} found {find}.",
             "One cold evening, {N} saw {find}.")
STORY_OWNER = ("It belonged to a {f} called {M}.", "A {f} called {M} had lost it.")
STORY_MIDDLE = ("So {N} walked seven miles to bring it back.",
                "So {N} went from house to house and asked nine neighbours.",
                "So {N} waited three days until the {f} came by.",
                "At first {N} wanted to keep it, but that felt wrong.")
STORY_THEN = ("When {M} saw it, both of them laughed and danced.",
              "The {f} was so happy that nobody slept that night.",
              "To say thank you, {M} baked a big cake for {N}.")
STORY_END = ("From that day on, {N} and {M} were the best of friends.",
             "And since then, {N} and {M} have tea every Sunday.")
STORY_PARTS = (  # the n-th story has the n-th variant of each part
    STORY_START, (STORY_HOME,), STORY_DAY, STORY_OWNER, STORY_MIDDLE, STORY_THEN, STORY_END, ("The end.",)
)

NOUNS = words("weather engine planet river computer history language mathematics bread window government ocean "
              "camera bridge doctor theory picture market energy flower ship winter iron paper machine sugar "
              "mountain school dream war law")
VERBS = words("build write explain cook repair find sell translate draw open calculate paint learn buy fix "
              "describe compare improve send install list define summarise solve plan")
ODDITIES = ("How do I {verb} a {noun}?", "What is the capital of {x}?", "Explain {noun} to me.",
            "{Verb} the {noun} and the {noun}.", "Why is the {noun} so big?", "Translate {x} into French.",
            "What is {n} plus {n}?", "Write a {noun} about {noun}.", "Can you {verb} my {noun}?",
            "Who invented the {noun}?", "{x} {x} {noun} {verb} {x}.", "What does {x} mean?",
            "Is the {noun} better than the {noun}?", "How far is the {noun}?", "{Verb} {x} in Python.",
            "def {x}({x}): return {n}", "Who was {x} {x}?", "When did the {noun} begin?", "{x}", "{noun}",
            "{noun} {noun} {noun}", "{n}", "{n} {n} {n}", "I think that the {noun} will {verb} the {noun}.",
            "The {noun} and the {noun} {verb} it all day.", "What do you think about {noun}?",
            "Give me {n} examples of {noun}.", "{Verb} this text: the {noun} is a {noun}.")

SYSTEM_SHORT = ("You are a helpful assistant.", "You are a friendly assistant.", "Be brief.",
                "Answer politely.", "Be nice.", "You are a helpful assistant that answers in English.",
                "Answer in one sentence.", "You are a chat bot.", "You are an assistant. Be concise and kind.",
                "Respond as a pirate.", "You are a pirate.")
SYSTEM_RULES = ("Always be polite.", "Answer in short sentences.", "Never talk about politics.",
                "If you do not know something, say so.", "Do not use bad words.", "Speak English.",
                "Tell a story when you are asked for one.", "Remember what people tell you.",
                "Help everybody who asks for help.", "Be patient with children.", "Do not invent facts.",
                "Stay calm at all times.", "Greet people when they greet you.", "Say goodbye when they leave.",
                "Keep secrets to yourself.", "Use simple words.", "Think before you answer.",
                "Take the last value when a fact is corrected.", "Only use facts from this conversation.",
                "Do not repeat yourself.", "These rules are important.",
                "The rules of this house are as follows.")
