package openai

import (
	"fmt"
	"strconv"

	"github.com/tidwall/gjson"
)

// Error is an error as a client of the API sees it: an HTTP status and a body
// in OpenAI's shape.
type Error struct {
	Status  int
	Code    string // machine-readable, "" for none
	Param   string // the request's field at fault, "" for none
	Message string
	// Raw is an engine's own error document, which is then the body.
	Raw []byte
}

func (e *Error) Error() string { return strconv.Itoa(e.Status) + " " + e.Message }

// Body returns the error document: {"error": {message, type, param, code}}.
func (e *Error) Body() []byte {
	if e.Raw != nil {
		return e.Raw
	}
	kind := "invalid_request_error"
	if e.Status >= 500 {
		kind = "server_error"
	}
	orNull := func(s string) string {
		if s == "" {
			return "null"
		}
		return quote(s)
	}
	return []byte(`{"error":{"message":` + quote(e.Message) + `,"type":` + quote(kind) +
		`,"param":` + orNull(e.Param) + `,"code":` + orNull(e.Code) + `}}`)
}

// BadRequest returns a 400 that names the field at fault.
func BadRequest(param, format string, args ...any) *Error {
	return &Error{Status: 400, Code: "bad_request", Param: param, Message: fmt.Sprintf(format, args...)}
}

// EngineError reads the body of an engine's error answer. A document in the
// shape of an error is kept whole; of anything else only the status is told.
func EngineError(status int, body []byte) *Error {
	e := &Error{Status: status, Message: fmt.Sprintf("the engine answered with status %d", status)}
	o, err := ParseObject(body)
	if err != nil {
		return e
	}
	for _, text := range []gjson.Result{o.Get("error").Get("message"), o.Get("message"), o.Get("detail")} {
		if text.Type == gjson.String && text.Str != "" {
			e.Message = text.Str
			break
		}
	}
	if o.Get("error").IsObject() {
		e.Raw = body
	}
	return e
}
