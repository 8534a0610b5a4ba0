package model

// The vocabulary: the 256 bytes, then the special tokens. The model only ever
// answers with printable ASCII, newline or EOS, so that each token is a whole
// character of text.
const (
	BOS       = 256 + iota // begins every prompt that is given as text
	EOS                    // ends an answer
	System                 // begins a system message
	User                   // begins a user's message
	Assistant              // begins an assistant's message, and the answer
	EndTurn                // ends a message
	VocabSize
)

// answerable reports whether the model may answer with a token.
func answerable(token int) bool {
	return token == '\n' || token >= ' ' && token <= '~' || token == EOS
}

// Encode returns the tokens of a prompt: BOS and the bytes of the text.
func Encode(text string) []int {
	return appendText(append(make([]int, 0, len(text)+1), BOS), text)
}

func appendText(tokens []int, text string) []int {
	for i := range len(text) {
		tokens = append(tokens, int(text[i]))
	}
	return tokens
}

// Message is one message of a conversation.
type Message struct {
	Role string // "system" (or "developer"), "user" or "assistant"
	Text string
}

// EncodeChat returns the tokens of a conversation, up to where the assistant's
// answer begins. ok is false when role i of the messages is unknown; then
// unknown is i.
func EncodeChat(messages []Message) (tokens []int, unknown int, ok bool) {
	tokens = []int{BOS}
	for i, m := range messages {
		switch m.Role {
		case "system", "developer":
			tokens = append(tokens, System)
		case "user":
			tokens = append(tokens, User)
		case "assistant":
			tokens = append(tokens, Assistant)
		default:
			return nil, i, false
		}
		tokens = append(appendText(tokens, m.Text), EndTurn)
	}
	return append(tokens, Assistant), 0, true
}

// Decode returns the text of tokens; special tokens have none.
func Decode(tokens []int) string {
	b := make([]byte, 0, len(tokens))
	for _, t := range tokens {
		if t < 256 {
			b = append(b, byte(t))
		}
	}
	return string(b)
}
