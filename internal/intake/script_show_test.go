package intake

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// ---- writing actions ----

var noteNames = map[NoteKind]string{
	NoteWaiting: "waiting", NoteAdmitted: "admitted", NoteRefused: "refused", NoteEnded: "ended", NoteReleased: "released",
	NoteUnclaimed: "unclaimed", NoteLeaseExpired: "lease expired", NoteSession: "session", NotePeerRefused: "peer refused",
	NoteQuarantined: "quarantined", NoteTrusted: "trusted", NoteViolation: "violation", NoteChecksum: "checksum", NoteEndingEvicted: "ending evicted",
}

func (s *script) action(a Action) string {
	switch a := a.(type) {
	case Send:
		return fmt.Sprintf("%s <- %s", s.names[a.Conn-1], show(a.Msg))
	case Close:
		return "close " + s.names[a.Conn-1]
	case Wake:
		return fmt.Sprintf("wake at %gs", kv.Duration(a.At).Seconds())
	case Answer:
		switch {
		case a.Err != nil:
			return fmt.Sprintf("call %d: %v", a.Call, clip(a.Err.Error()))
		case a.Ending != nil:
			return fmt.Sprintf("call %d: %s", a.Call, show(a.Ending))
		case a.Found != nil:
			return fmt.Sprintf("call %d: %s", a.Call, show(a.Found))
		case a.Claim != nil:
			return fmt.Sprintf("call %d: %s", a.Call, show(a.Claim))
		}
		return fmt.Sprintf("call %d: done", a.Call)
	case Note:
		kind := noteNames[a.Kind]
		a.Kind = 0
		return "note " + kind + strings.TrimPrefix(show(a), "Note")
	}
	return show(a)
}

// show prints a struct's fields that are not zero.
func show(x any) string {
	v := reflect.Indirect(reflect.ValueOf(x))
	b := v.Type().Name()
	for i := range v.NumField() {
		f := v.Field(i)
		if !f.IsZero() {
			b += " " + strings.ToLower(v.Type().Field(i).Name) + "=" + value(f)
		}
	}
	return b
}

func value(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case kv.Incarnation:
		return strings.TrimRight(string(x[:]), "\x00")
	case kv.Duration:
		return fmt.Sprintf("%gs", x.Seconds())
	case string:
		return clip(x)
	case fault.Code:
		return string(x)
	}
	switch v.Kind() {
	case reflect.Slice:
		if v.Len() > 0 && (v.Index(0).CanInt() || v.Index(0).CanUint()) {
			return ranges(v)
		}
		var p []string
		for i := range v.Len() {
			if v.Index(i).Kind() == reflect.String {
				p = append(p, clip(v.Index(i).String()))
				continue
			}
			p = append(p, strings.TrimSpace(strings.TrimPrefix(show(v.Index(i).Interface()), v.Index(i).Type().Name())))
		}
		return "[" + strings.Join(p, "; ") + "]"
	case reflect.Pointer:
		return show(v.Interface())
	}
	return fmt.Sprint(v.Interface())
}

func clip(s string) string {
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	if strings.Contains(s, " ") {
		return "'" + s + "'"
	}
	return s
}

// ranges prints [0 1 2 5] as 0..2,5.
func ranges(v reflect.Value) string {
	var n []int64
	for i := range v.Len() {
		if v.Index(i).CanInt() {
			n = append(n, v.Index(i).Int())
		} else {
			n = append(n, int64(v.Index(i).Uint()&math.MaxInt64))
		}
	}
	var p []string
	for i := 0; i < len(n); {
		j := i
		for j+1 < len(n) && n[j+1] == n[j]+1 {
			j++
		}
		if j > i {
			p = append(p, fmt.Sprintf("%d..%d", n[i], n[j]))
		} else {
			p = append(p, fmt.Sprint(n[i]))
		}
		i = j + 1
	}
	return strings.Join(p, ",")
}
