//go:build nixl

package nixllink

import (
	"testing"

	"github.com/berthkv/berth/internal/link/linktest"
)

const processes = true

func newLibrary() func(testing.TB) *Library { return testLibrary }

// testLibrary loads the real library: from BERTH_NIXL_LIB or a Python
// environment.
func testLibrary(tb testing.TB) *Library {
	l, err := Load("")
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

func TestMain(m *testing.M) { linktest.Main(m, harness()) }
