package nixllink

import "errors"

// library is a loaded NIXL library.
type library interface {
	// newAgent makes an agent with the backends and registers pool, which must
	// not move, as its memory.
	newAgent(name string, backends []string, pool []byte) (agent, error)
	// flavour is the Python module name of the library's own bindings.
	flavour() string
}

// agent is one NIXL agent. All methods are called by its owner alone.
type agent interface {
	metadata() ([]byte, error)
	// load makes a remote agent known; forget disconnects from it.
	load(metadata []byte) (name string, err error)
	forget(name string)
	// post starts a write of local memory to a remote agent's.
	post(remote string, to remoteMemory, src uintptr, n int64) (request, error)
	// poll says whether a write is done; an error says that it failed.
	poll(request) (done bool, err error)
	// release ends a request, done or not.
	release(request)
	close()
}

// request is a write that was posted.
type request any

// remoteMemory is where a write goes.
type remoteMemory struct {
	memory memory
	device uint64
	addr   uint64
}

// ErrNotBuilt: the binary was built without the tag nixl.
var ErrNotBuilt = errors.New("this build has no nixl link: build one with make build-nixl, or set links (for example [shm, tcp])")

// Library is a loaded library, for NewReceiver and NewSender.
type Library struct{ lib library }

// Load loads NIXL's C library from path, or from where Find finds it when path
// is "". The error names what is missing.
func Load(path string) (*Library, error) {
	if !Built {
		return nil, ErrNotBuilt
	}
	at, err := find(path)
	if err != nil {
		return nil, err
	}
	l, err := open(at)
	if err != nil {
		return nil, err
	}
	return &Library{l}, nil
}
