"""`cuda_library`: one nvcc action for each source, so that slow kernels compile side by side.

Each action also keeps what ptxas reports about registers, spills and stack (output group `ptxas_report`): the report
is the only place where a spill or a serialised wgmma shows, so `kernel_report_test` reads it.
"""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # Names of intermediate files reach the object's symbols. Beside the object they are derived from its name; in
    # the temporary folder they carry the process id, and no two builds would be alike.
    "--objdir-as-tempdir",
]

# nvcc tells everything on stderr: the report keeps it but for the time it took (two builds shall be alike), and the log
# shows what is no ptxas statistic: warnings, and the numbered remarks such as that of a serialised wgmma.
_COMPILE = """
report=$1; shift
"$@" 2>"$report" || { cat "$report" >&2; exit 1; }
sed -i '/^ptxas info *: Compile time/d' "$report"
grep -v -e '^ptxas info *: [^(]' -e '^    [0-9]* bytes stack frame' "$report" >&2 || true
"""

def _cuda_library_impl(ctx):
    cc_toolchain = find_cc_toolchain(ctx)
    feature_configuration = cc_common.configure_features(ctx = ctx, cc_toolchain = cc_toolchain)
    deps = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._runtime]]
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([".", ctx.bin_dir.path]),
    )
    headers = cc_common.merge_compilation_contexts(
        compilation_contexts = [own] + [dep.compilation_context for dep in deps],
    )

    objects, reports = [], []
    for source in ctx.files.srcs:
        stem = "%s/%s" % (ctx.label.name, source.basename.removesuffix(".cu"))
        objects.append(ctx.actions.declare_file(stem + ".o"))
        reports.append(ctx.actions.declare_file(stem + ".ptxas.txt"))

        args = ctx.actions.args()
        args.add(reports[-1])
        args.add(ctx.executable._nvcc)
        args.add("-ccbin", cc_toolchain.compiler_executable)
        args.add_all(_NVCC_FLAGS)
        args.add_all(["-gencode=arch=compute_%s,code=sm_%s" % (arch, arch) for arch in ctx.attr.gpu_archs])
        if ctx.var["COMPILATION_MODE"] == "dbg":
            # For profilers and compute-sanitizer. Not in other modes: it writes the sources' modification times into
            # the machine code, and no two checkouts would build the same library.
            args.add("-lineinfo")
            args.add("-DATREX_RACECHECK")
        args.add_all(ctx.attr.copts)
        args.add_all(headers.includes, before_each = "-I")
        args.add_all(headers.quote_includes, before_each = "-I")
        args.add_all(headers.system_includes, before_each = "-I")

        # Names with internal linkage carry a hash of the source's path, which nvcc makes absolute: another name in
        # each checkout. The front end takes the last of two, and has no public flag for it.
        args.add(source, format = "-Xcudafe=--orig_src_path_name=%s")
        args.add("-c", source)
        args.add("-o", objects[-1])
        ctx.actions.run_shell(
            command = _COMPILE,
            arguments = [args],
            inputs = depset(
                [source],
                transitive = [headers.headers, ctx.attr._compiler.files, cc_toolchain.all_files],
            ),
            outputs = [objects[-1], reports[-1]],
            tools = [ctx.executable._nvcc],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s for sm_%s" % (source.short_path, ", sm_".join(ctx.attr.gpu_archs)),
            use_default_shell_env = True,
        )

    linking_context, linking_outputs = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        cc_toolchain = cc_toolchain,
        feature_configuration = feature_configuration,
        linking_contexts = [dep.linking_context for dep in deps],
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset([linking_outputs.library_to_link.pic_static_library])),
        OutputGroupInfo(ptxas_report = depset(reports)),
        CcInfo(
            compilation_context = headers,
            linking_context = linking_context,
        ),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    doc = "Compiles CUDA C++ sources into a static library that cc rules can link.",
    attrs = {
        "copts": attr.string_list(doc = "further flags of nvcc"),
        "deps": attr.label_list(providers = [CcInfo], doc = "libraries whose headers the sources include"),
        "gpu_archs": attr.string_list(
            mandatory = True,
            allow_empty = False,
            doc = "compute capabilities to make machine code for, such as 90a",
        ),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(mandatory = True, allow_empty = False, allow_files = [".cu"]),
        "_compiler": attr.label(default = "@cuda//:compiler"),
        "_nvcc": attr.label(default = "@cuda//:toolkit/bin/nvcc", allow_single_file = True, executable = True, cfg = "exec"),
        "_runtime": attr.label(default = "@cuda//:runtime", providers = [CcInfo]),
    },
    fragments = ["cpp"],
    toolchains = use_cc_toolchain(),
)
