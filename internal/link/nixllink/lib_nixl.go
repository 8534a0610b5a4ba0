//go:build nixl && cgo

package nixllink

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

// What is called of NIXL's C library. Every call returns 0 done, 1 in progress,
// below 0 an error. Handles are opaque.
typedef void *handle;

static struct {
	int (*create_agent)(const char *, handle *);
	int (*destroy_agent)(handle);
	int (*get_local_md)(handle, void **, size_t *);
	int (*load_remote_md)(handle, const void *, size_t, char **);
	int (*invalidate_remote_md)(handle, const char *);
	int (*get_plugin_params)(handle, const char *, handle *, handle *);
	int (*destroy_mem_list)(handle);
	int (*destroy_params)(handle);
	int (*create_backend)(handle, const char *, handle, handle *);
	int (*destroy_backend)(handle);
	int (*create_opt_args)(handle *);
	int (*destroy_opt_args)(handle);
	int (*opt_args_add_backend)(handle, handle);
	int (*create_reg_dlist)(int, handle *);
	int (*destroy_reg_dlist)(handle);
	int (*reg_dlist_add_desc)(handle, uintptr_t, size_t, uint64_t, const void *, size_t);
	int (*register_mem)(handle, handle, handle);
	int (*deregister_mem)(handle, handle, handle);
	int (*create_xfer_dlist)(int, handle *);
	int (*destroy_xfer_dlist)(handle);
	int (*xfer_dlist_add_desc)(handle, uintptr_t, size_t, uint64_t);
	int (*create_xfer_req)(handle, int, handle, handle, const char *, handle *, handle);
	int (*post_xfer_req)(handle, handle, handle);
	int (*get_xfer_status)(handle, handle);
	int (*release_xfer_req)(handle, handle);
	int (*destroy_xfer_req)(handle);
} nixl;

static const struct { const char *name; void **at; } symbols[] = {
#define S(f) {"nixl_capi_" #f, (void **)&nixl.f}
	S(create_agent), S(destroy_agent), S(get_local_md), S(load_remote_md), S(invalidate_remote_md),
	S(get_plugin_params), S(destroy_mem_list), S(destroy_params), S(create_backend), S(destroy_backend),
	S(create_opt_args), S(destroy_opt_args), S(opt_args_add_backend),
	S(create_reg_dlist), S(destroy_reg_dlist), S(reg_dlist_add_desc), S(register_mem), S(deregister_mem),
	S(create_xfer_dlist), S(destroy_xfer_dlist), S(xfer_dlist_add_desc),
	S(create_xfer_req), S(post_xfer_req), S(get_xfer_status), S(release_xfer_req), S(destroy_xfer_req),
#undef S
};

// resolve sets every function, or none and returns the name of one that is
// missing.
static const char *resolve(void *lib) {
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
		if (!dlsym(lib, symbols[i].name))
			return symbols[i].name;
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
		*symbols[i].at = dlsym(lib, symbols[i].name);
	return NULL;
}

static int create_agent(const char *n, handle *a) { return nixl.create_agent(n, a); }
static int destroy_agent(handle a) { return nixl.destroy_agent(a); }
static int get_local_md(handle a, void **p, size_t *n) { return nixl.get_local_md(a, p, n); }
static int load_remote_md(handle a, const void *p, size_t n, char **name) { return nixl.load_remote_md(a, p, n, name); }
static int invalidate_remote_md(handle a, const char *name) { return nixl.invalidate_remote_md(a, name); }
static int release(handle a, handle r) { int s = nixl.release_xfer_req(a, r); nixl.destroy_xfer_req(r); return s; }
static int status(handle a, handle r) { return nixl.get_xfer_status(a, r); }
static void destroy_backend(handle b) { nixl.destroy_backend(b); }
static void destroy_opts(handle o) { nixl.destroy_opt_args(o); }

static int add_backend(handle a, const char *name, handle opts, handle *backend) {
	handle mems = NULL, params = NULL;
	int s = nixl.get_plugin_params(a, name, &mems, &params);
	if (s == 0) {
		s = nixl.create_backend(a, name, params, backend);
		nixl.destroy_mem_list(mems);
		nixl.destroy_params(params);
	}
	return s ? s : nixl.opt_args_add_backend(opts, *backend);
}

static int opt_args(handle *o) { return nixl.create_opt_args(o); }

static int memory(handle a, uintptr_t addr, size_t n, handle opts, bool in) {
	handle d = NULL;
	int s = nixl.create_reg_dlist(0, &d);
	if (s) return s;
	s = nixl.reg_dlist_add_desc(d, addr, n, 0, NULL, 0);
	if (!s) s = in ? nixl.register_mem(a, d, opts) : nixl.deregister_mem(a, d, opts);
	nixl.destroy_reg_dlist(d);
	return s;
}

static int post(handle a, const char *remote, int mem, uint64_t dev, uintptr_t dst, uintptr_t src, size_t n, handle opts, handle *req) {
	handle l = NULL, r = NULL;
	int s = nixl.create_xfer_dlist(0, &l);
	if (!s) s = nixl.create_xfer_dlist(mem, &r);
	if (!s) s = nixl.xfer_dlist_add_desc(l, src, n, 0);
	if (!s) s = nixl.xfer_dlist_add_desc(r, dst, n, dev);
	if (!s) s = nixl.create_xfer_req(a, 1, l, r, remote, req, opts);
	if (l) nixl.destroy_xfer_dlist(l);
	if (r) nixl.destroy_xfer_dlist(r);
	if (s) return s;
	s = nixl.post_xfer_req(a, *req, opts);
	if (s < 0) { release(a, *req); *req = NULL; }
	return s;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"unsafe"
)

// Built says whether this build can load the library.
const Built = true

var opened struct {
	sync.Mutex
	path string // of the library that is loaded; it stays for the process's life
}

func open(at location) (library, error) {
	if err := at.setPluginDir(); err != nil {
		return nil, err
	}
	opened.Lock()
	defer opened.Unlock()
	if opened.path != "" && opened.path != at.path {
		return nil, fmt.Errorf("nixl_lib: %s is loaded already, %s cannot be beside it", opened.path, at.path)
	}
	path := C.CString(at.path)
	defer C.free(unsafe.Pointer(path))
	lib := C.dlopen(path, C.RTLD_NOW|C.RTLD_LOCAL)
	if lib == nil {
		return nil, fmt.Errorf("nixl_lib: %s", C.GoString(C.dlerror()))
	}
	if missing := C.resolve(lib); missing != nil {
		return nil, fmt.Errorf("nixl_lib: %s (NIXL %s) has no %s; it was tried with NIXL 1.5.1", at.path, at.version, C.GoString(missing))
	}
	opened.path = at.path
	return &capi{at}, nil
}

// capi is the C library.
type capi struct{ at location }

func (c *capi) flavour() string { return c.at.module }

func failed(what string, s C.int) error {
	if s >= 0 {
		return nil
	}
	return fmt.Errorf("NIXL: %s failed: status %d", what, int(s))
}

// capiAgent is one agent with its backends.
type capiAgent struct {
	h, opts  C.handle
	backends []C.handle
	pool     []byte
}

func (c *capi) newAgent(name string, backends []string, pool []byte) (agent, error) {
	a := &capiAgent{pool: pool}
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	if err := failed("nixl_capi_create_agent", C.create_agent(n, &a.h)); err != nil {
		return nil, err
	}
	if err := failed("nixl_capi_create_opt_args", C.opt_args(&a.opts)); err != nil {
		C.destroy_agent(a.h)
		return nil, err
	}
	for _, b := range backends {
		n, h := C.CString(b), C.handle(nil)
		err := failed("backend "+b+" (of nixl_backends)", C.add_backend(a.h, n, a.opts, &h))
		C.free(unsafe.Pointer(n))
		if err != nil {
			a.pool = nil
			a.close()
			return nil, err
		}
		a.backends = append(a.backends, h)
	}
	if err := failed(fmt.Sprintf("registering %d bytes with %s", len(pool), strings.Join(backends, ", ")), C.memory(a.h, a.base(), C.size_t(len(pool)), a.opts, true)); err != nil {
		a.pool = nil
		a.close()
		return nil, err
	}
	return a, nil
}

func (a *capiAgent) base() C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(&a.pool[0]))) }

func (a *capiAgent) metadata() ([]byte, error) {
	var p unsafe.Pointer
	var n C.size_t
	if err := failed("nixl_capi_get_local_md", C.get_local_md(a.h, &p, &n)); err != nil {
		return nil, err
	}
	defer C.free(p)
	return C.GoBytes(p, C.int(n)), nil
}

func (a *capiAgent) load(metadata []byte) (string, error) {
	p := C.CBytes(metadata)
	defer C.free(p)
	var name *C.char
	if err := failed("nixl_capi_load_remote_md", C.load_remote_md(a.h, p, C.size_t(len(metadata)), &name)); err != nil {
		return "", err
	}
	defer C.free(unsafe.Pointer(name))
	return C.GoString(name), nil
}

func (a *capiAgent) forget(name string) {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	C.invalidate_remote_md(a.h, n)
}

func (a *capiAgent) post(remote string, to remoteMemory, src uintptr, n int64) (request, error) {
	name := C.CString(remote)
	defer C.free(unsafe.Pointer(name))
	var r C.handle
	if err := failed("posting a write", C.post(a.h, name, C.int(to.memory), C.uint64_t(to.device), C.uintptr_t(to.addr), C.uintptr_t(src), C.size_t(n), a.opts, &r)); err != nil {
		return nil, err
	}
	return r, nil
}

func (a *capiAgent) poll(r request) (bool, error) {
	s := C.status(a.h, r.(C.handle))
	return s == 0, failed("a write", s)
}

func (a *capiAgent) release(r request) { C.release(a.h, r.(C.handle)) }

func (a *capiAgent) close() {
	if len(a.pool) > 0 {
		C.memory(a.h, a.base(), C.size_t(len(a.pool)), a.opts, false)
	}
	C.destroy_opts(a.opts)
	C.destroy_agent(a.h)
	for _, b := range a.backends {
		C.destroy_backend(b)
	}
}

// setPluginDir tells the library where its plug-ins are, unless the operator
// has said so.
func (at location) setPluginDir() error {
	if os.Getenv("NIXL_PLUGIN_DIR") != "" {
		return nil
	}
	if _, err := os.Stat(at.plugins); err != nil {
		return errors.Join(fmt.Errorf("nixl_lib: no plug-ins beside %s; set NIXL_PLUGIN_DIR", at.path), err)
	}
	return os.Setenv("NIXL_PLUGIN_DIR", at.plugins)
}
